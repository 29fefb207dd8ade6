"""Errors of the gradients of a head in bfloat16, relative to float64: stock PyTorch, flce, and flce with E4M3 products.

    python scripts/fp8_errors.py --steps 800 --out errors.txt

The heads are random, or of a language model after 20 and after all steps of training on Python's own source code. It
needs a Hopper GPU, and tokenizers and transformers. Two minutes.
"""

from __future__ import annotations

import argparse
import itertools
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flce

TOKENS, HIDDEN, VOCAB = 4096, 1024, 32000
MAX_CHARACTERS = 20_000_000
METHODS: dict[str, flce.ChunkOptions | None] = {
    "stock": None,
    "flce": flce.ChunkOptions(),
    "E4M3": flce.ChunkOptions(grad_dtype=torch.float8_e4m3fn),
}
Head = tuple[str, Tensor, Tensor]


def random_heads() -> Iterator[Head]:
    """Yield names, hidden states and heads."""
    for std in (0.5, 2.0, 4.0, 6.0):
        torch.manual_seed(1)
        x, w = (torch.randn(n, HIDDEN, device="cuda") for n in (TOKENS, VOCAB))
        yield f"random, {std:g}", x.bfloat16(), (w * std / HIDDEN**0.5).bfloat16()


def trained_heads(steps: int) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Train a model. Yield names, hidden states, heads and targets."""
    import tokenizers
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = Path(sysconfig.get_path("stdlib"))
    text = [file.read_text(errors="replace") for file in sorted(folder.rglob("*.py")) if "test" not in file.parts]
    text = text[: sum(1 for size in itertools.accumulate(map(len, text)) if size < MAX_CHARACTERS)]
    words: Any = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=VOCAB, show_progress=False, initial_alphabet=alphabet)
    words.train_from_iterator(text, trainer)
    ids = torch.tensor([i for each in words.encode_batch(text) for i in each.ids], device="cuda")
    sizes: Any = {"hidden_size": HIDDEN, "intermediate_size": 3 * HIDDEN, "num_hidden_layers": 8, "head_dim": 64}
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=VOCAB, num_attention_heads=16, num_key_value_heads=8, **sizes)
    with torch.device("cuda"):
        model: Any = flce.patch_model(Qwen3ForCausalLM(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-4, total_steps=steps, pct_start=0.1)
    for step in range(1, steps + 1):
        starts = torch.randint(len(ids) - 1025, (16, 1), device="cuda")
        batch = ids[starts + torch.arange(1025, device="cuda")]
        with torch.autocast("cuda", torch.bfloat16):
            model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step in (20, steps):
            with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
                x = model.model(batch[:4, :-1]).last_hidden_state.flatten(0, 1)
            yield (
                f"trained, {step} steps",
                x.bfloat16(),
                model.lm_head.weight.detach().bfloat16(),
                batch[:4, 1:].flatten(),
            )


def errors(x: Tensor, w: Tensor, y: Tensor) -> tuple[float, dict[str, list[float]]]:
    """Return the loss and, for each method, the relative errors of dX, dW, the median row of dW, and the loss."""
    inputs = [t.double().requires_grad_() for t in (x, w)]
    exact = F.cross_entropy(inputs[0] @ inputs[1].t(), y)
    dx, dw = torch.autograd.grad(exact, inputs)
    norms, found = dw.norm(dim=1), {}
    for name, options in METHODS.items():
        a, b = (t.clone().requires_grad_() for t in (x, w))
        stock = options is None
        loss: Any = (
            F.cross_entropy((a @ b.t()).float(), y)
            if stock
            else flce.fused_linear_cross_entropy(a, b, y, options=options)
        )
        loss.backward()
        assert a.grad is not None
        assert b.grad is not None
        rows = ((b.grad - dw).norm(dim=1) / norms)[norms > 1e-4 * norms.max()].median()
        both = [float((grad - g).norm() / g.norm()) for grad, g in ((a.grad, dx), (b.grad, dw))]
        found[name] = [*both, float(rows), abs(loss.item() - exact.item()) / exact.item()]
    return exact.item(), found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    lines = [f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}; {TOKENS} x {HIDDEN} x {VOCAB}"]
    lines.append("head | loss | method | dX | dW | median row of dW | loss")

    def report(name: str, x: Tensor, w: Tensor, given: Tensor | None) -> None:
        drawn = torch.multinomial(torch.softmax(x.float() @ w.float().t(), 1), 1)[:, 0]
        half = drawn.where(torch.arange(len(x), device="cuda") % 2 == 0, -100)
        for targets, y in (("", given), (", drawn targets", drawn), (", drawn targets, half ignored", half)):
            if y is not None:
                loss, found = errors(x, w, y)
                for method, values in found.items():
                    lines.append(f"{name}{targets} | {loss:.2f} | {method} | " + " | ".join(f"{v:.2e}" for v in values))
                    print(lines[-1], flush=True)

    for name, x, w in random_heads():
        report(name, x, w, None)
    for name, x, w, y in trained_heads(arguments.steps):
        report(name, x, w, y)
    if arguments.out is not None:
        arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
