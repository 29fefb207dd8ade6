"""Hidden states, heads and targets of real models, and of models that are trained here, for the command `operator`.

The models are those of `integrations/real_models.py`. A case with a larger hidden size than its model has the same
logits: hidden states and head are multiplied by one matrix with orthonormal rows. The head "trained" is of a language
model of two layers that is trained on both texts until its loss is below `TRAINED_LOSS`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flce

TEXTS = ("code", "english")
# Random heads whose logits are those of Zipf's law plus noise of a standard deviation, "zipf 6".
ZIPF = "zipf"
SEQUENCE = 1024
SKIPPED = 100_000  # tokens at the start of a text
TRAINED_LOSS, TRAINED_STEPS, TRAINED_BATCH = 2.8, 1500, 8
TRAINED_TOKENS = 6_000_000  # of both texts


def sequences(ids: Tensor, tokens: int) -> Tensor:
    """Return consecutive sequences of the ids, (batch, sequence + 1)."""
    length = min(SEQUENCE, tokens)
    return ids[: tokens // length * (length + 1)].view(-1, length + 1)


@torch.no_grad()
def hidden_states(model: Any, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Return the last hidden states, (N, H), and the targets, (N,)."""
    states = [model.model(input_ids=ids[None, :-1]).last_hidden_state[0] for ids in batch]
    return torch.cat(states).float(), batch[:, 1:].flatten()


@functools.lru_cache(maxsize=1)
def load_model(name: str, device: torch.device) -> tuple[Any, dict[str, Tensor]]:
    """Return a real model and the token ids of each text."""
    import real_models

    model, tokenizer = real_models.load(name)
    count = SKIPPED + 33 * (SEQUENCE + 1)
    ids = {text: real_models.token_ids(tokenizer, found, count) for text, found in real_models.texts().items()}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return model.to(device, dtype).eval(), {text: found[SKIPPED:].to(device) for text, found in ids.items()}


def train_on_texts(model: Any, device: torch.device, until: float, steps: int) -> dict[str, Tensor]:
    """Train a model of float32 on both texts. Return ids of each text that it was trained on.

    The tokens are those of SmolLM2, so most classes never occur, as in the vocabulary of a model of many languages.

    Args:
        until: training ends at this loss.
        steps: at most this many steps.
    """
    from transformers import AutoTokenizer

    import real_models

    tokenizer = AutoTokenizer.from_pretrained(real_models.model_folder("smollm2"))
    documents, count = real_models.texts(), TRAINED_TOKENS // 2
    ids = {text: real_models.token_ids(tokenizer, documents[text], count).to(device) for text in TEXTS}
    flce.patch_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)
    data, mean = torch.cat([sequences(part, len(part) // (SEQUENCE + 1) * SEQUENCE) for part in ids.values()]), None
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-4 * min(1.0, (step + 1) / 50)
        batch = data[torch.randint(len(data), (TRAINED_BATCH,), device=device)]
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() if mean is None else mean.lerp(loss.detach(), 0.05)
        if step % 50 == 49 and mean < until:
            break
    flce.unpatch_model(model)
    return ids


@functools.lru_cache(maxsize=1)
def train_model(hidden: int, vocab: int, device: torch.device) -> tuple[Any, dict[str, Tensor]]:
    """Train a language model of two layers on both texts. Return it, and ids of each text that it was trained on."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": hidden, "num_hidden_layers": 2, "head_dim": 64}
    config = Qwen3Config(vocab_size=vocab, num_attention_heads=16, num_key_value_heads=16, **sizes)
    with device:
        model: Any = Qwen3ForCausalLM(config)
    ids = train_on_texts(model, device, TRAINED_LOSS, TRAINED_STEPS)
    return model.to(torch.bfloat16).eval(), ids


def real_head(head: str, shape: tuple[int, int, int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states (N, H), head (V, H) and targets (N,) of a head such as "gemma3 code", in float32.

    Raises:
        ValueError: the model has a larger hidden size, or another vocabulary.
    """
    tokens, hidden, vocab = shape
    name, text = head.split()
    if name == ZIPF:
        return zipf_head(shape, float(text), device)
    model, ids = train_model(hidden, vocab, device) if name == "trained" else load_model(name, device)
    x, target = hidden_states(model, sequences(ids[text], tokens)[: -(-tokens // SEQUENCE)])
    weight = model.get_output_embeddings().weight.detach().float()
    if len(weight) != vocab or weight.shape[1] > hidden:
        raise ValueError(f"{name} has V = {len(weight)} and H = {weight.shape[1]}, got V = {vocab} and H = {hidden}")
    if weight.shape[1] < hidden:
        generator = torch.Generator(device).manual_seed(0)
        normal = torch.randn(hidden, weight.shape[1], device=device, generator=generator)
        isometry = torch.linalg.qr(normal)[0].t()
        x, weight = x @ isometry, weight @ isometry
    return x, weight, target


@torch.no_grad()
def zipf_head(shape: tuple[int, int, int], std: float, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return a random head whose classes have frequencies of Zipf's law, with targets that are drawn from its
    probabilities. No class is frequent in many rows, because the noise does not depend on the class."""
    tokens, hidden, vocab = shape
    generator = torch.Generator(device).manual_seed(0)
    x, weight = (torch.randn(rows, hidden, device=device, generator=generator) for rows in (tokens, vocab))
    weight *= std / hidden**0.5
    ranks = torch.randperm(vocab, device=device, generator=generator)
    x[:, 0], weight[:, 0] = 1.0, -1.1 * torch.log(ranks + 5.0)
    probabilities = ((part @ weight.t()).softmax(-1) for part in x.split(512))
    return x, weight, torch.cat([torch.multinomial(p, 1, generator=generator)[:, 0] for p in probabilities])


@torch.no_grad()
def distribution(x: Tensor, weight: Tensor, target: Tensor) -> dict[str, float]:
    """Return means over tokens: loss, entropy, numbers of large probabilities, and the sum of all others."""
    sums = torch.zeros(5, dtype=torch.float64, device=x.device)
    for rows, labels in zip(x.split(512), target.split(512), strict=True):
        logprobs = (rows.float() @ weight.float().t()).log_softmax(-1)
        probabilities = logprobs.exp()
        loss, entropy = -logprobs.gather(1, labels[:, None]), -(probabilities * logprobs).sum(-1)
        large = [probabilities > 2.0**-8, probabilities > 2.0**-12]
        parts = (loss, entropy, *large, probabilities.where(~large[1], 0.0))
        sums += torch.stack([part.sum(dtype=torch.float64) for part in parts])
    return dict(
        zip(("loss", "entropy", "p > 2^-8", "p > 2^-12", "sum of the others"), (sums / len(x)).tolist(), strict=True)
    )


def draw_rows(head: str, shape: tuple[int, int, int], file: Path, tokens: Sequence[int]) -> None:
    """Draw the sorted probabilities of some tokens of a head, and what `sample_below` does with them."""
    from matplotlib.figure import Figure

    x, weight, _ = real_head(head, shape, torch.device("cpu"))
    figure = Figure(figsize=(7.2, 3.8), dpi=150, layout="constrained")
    axes = figure.subplots()
    for probabilities in (x[list(tokens)] @ weight.t()).softmax(-1).sort(-1, descending=True).values:
        axes.loglog(range(1, len(probabilities) + 1), probabilities, color="#c0392b", linewidth=1.2)
    limit = 2.0**-12
    axes.axhspan(limit, 1.0, color="#2c3e50", alpha=0.12, linewidth=0)
    axes.text(400, 0.1, "at least 2^-12: all are kept", fontsize=11)
    axes.text(1.3, 1e-8, "below: kept with probability p / 2^-12,\nand then as if p were 2^-12", fontsize=11)
    axes.set(xlabel="classes of a token, by probability", ylabel="probability p", xlim=(1, shape[2]), ylim=(1e-10, 1))
    figure.savefig(file)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m benchmarks.real_heads FILE.png")
    draw_rows("smollm2 code", (1024, 576, 49152), Path(sys.argv[1]), range(40, 1024, 123))
