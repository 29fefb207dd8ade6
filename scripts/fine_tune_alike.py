"""Fine-tuning of a real model on Python code: stock, flce, flce with sampled gradients, and stock on reordered data.

    python scripts/fine_tune_alike.py gemma3 --out gemma3.json
    python scripts/fine_tune_alike.py smollm2 --lora --out smollm2.json    # adapters on all layers except the head

The models are those of `integrations/real_models.py`. All runs have the same weights, AdamW, and the same sequences.
The last run has the sequences in another order: its distance from the first is the spread. Held-out code and English
are files, and documentation strings of files, that no run trains on.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flce
from flce.core.log import sampled_passes

sys.path.append(str(Path(__file__).resolve().parents[1] / "integrations"))
import demo
import real_models

BATCH = 4
LAST = 50  # steps of which the training losses are averaged
EVALUATED = 64  # sequences of each held-out text
RARE = 5  # a class that occurs at most as often in training is rare
STOCK, OTHER_ORDER = "stock", "stock, other order"
RUNS: dict[str, flce.ChunkOptions | None] = {
    STOCK: None,
    "flce": flce.ChunkOptions(),
    "flce, sampled": flce.ChunkOptions(sample_below=2.0**-12),
    OTHER_ORDER: None,
}


def sequences_of_texts(tokenizer: Any, count: int, tokens: int) -> dict[str, Tensor]:
    """Return `count` sequences to train on, and held-out sequences of code and of English, (B, tokens + 1) each."""
    documents = demo.read_documents()
    documents = random.Random(0).sample(documents, len(documents))
    held_out, rest = documents[: len(documents) // 8], documents[len(documents) // 8 :]
    english = ["\n\n".join(found) for source in held_out if (found := real_models.docstrings(source))]
    sizes = {"training": (rest, count), "code": (held_out, EVALUATED), "english": (english, EVALUATED)}
    return {
        name: real_models.token_ids(tokenizer, texts, rows * (tokens + 1)).view(rows, tokens + 1)
        for name, (texts, rows) in sizes.items()
    }


def train(model: Any, batches: Tensor, rate: float, options: flce.ChunkOptions | None) -> tuple[list[float], int]:
    """Return the loss of each step, and the number of steps whose gradients could not be sampled."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate)
    losses = []
    if options is not None:
        flce.patch_model(model, options=options)
    sampled_passes.clear()
    for step, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / 10)
        with torch.autocast(batch.device.type, torch.bfloat16):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if options is not None:
        flce.unpatch_model(model)
    return torch.stack(losses).tolist(), sampled_passes["dense"]


@torch.no_grad()
def token_losses(model: Any, batch: Tensor) -> Tensor:
    """Return the loss of each token that has a predecessor, (B, tokens)."""
    losses = []
    for ids in batch:
        with torch.autocast(batch.device.type, torch.bfloat16):
            logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0]
        losses.append(F.cross_entropy(logits.float(), ids[1:], reduction="none"))
    return torch.stack(losses)


def by_frequency(values: Tensor, counts: Tensor) -> dict[str, float]:
    """Return the mean of values of classes that training never has, of rare ones, and of all others."""
    groups = {"never": counts == 0, "rare": (counts > 0) & (counts <= RARE), "others": counts > RARE}
    return {name: values[group].mean().item() for name, group in groups.items()}


def fine_tune(name: str, steps: int, tokens: int, lora: bool, device: str) -> dict[str, dict[str, Any]]:
    """Return figures of each run."""
    stock, tokenizer = real_models.load(name)
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        stock = get_peft_model(stock, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    texts = {name: rows.to(device) for name, rows in sequences_of_texts(tokenizer, steps * BATCH, tokens).items()}
    stock = stock.to(device).train()
    weight = stock.get_output_embeddings().weight.detach().clone()
    counts, code = texts["training"].flatten().bincount(minlength=len(weight)), texts["code"]
    order = torch.randperm(steps * BATCH, generator=torch.Generator().manual_seed(0)).to(device)
    found: dict[str, dict[str, Any]] = {}
    for run, options in RUNS.items():
        model, start = copy.deepcopy(stock), time.monotonic()
        rows = texts["training"][order if run == OTHER_ORDER else slice(None)]
        losses, dense = train(model, rows.view(steps, BATCH, -1), 5e-4 if lora else 5e-5, options)
        seconds = time.monotonic() - start
        model.eval()
        held_out = token_losses(model, code)
        found[run] = {
            "last steps": sum(losses[-LAST:]) / len(losses[-LAST:]),
            "held out": held_out.mean().item(),
            "held out, by frequency": by_frequency(held_out, counts[code[:, 1:]]),
            "english": token_losses(model, texts["english"]).mean().item(),
        }
        if not lora:
            change = model.get_output_embeddings().weight.detach() - weight
            found[run]["change of rows"] = by_frequency(change.norm(dim=1) / weight.norm(dim=1), counts)
        found[run] |= {"dense steps": dense, "seconds": seconds, "losses": losses}
        print(run, {key: value for key, value in found[run].items() if key != "losses"}, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(real_models.MODELS))
    parser.add_argument("--lora", action="store_true", help="train adapters of rank 16")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--tokens", type=int, default=1024, help="of each of the 4 sequences of a step")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    settings = vars(arguments)
    out = settings.pop("out")
    runs = fine_tune(**settings)
    if arguments.device == "cuda":
        settings["device"] = torch.cuda.get_device_name()
    out.write_text(json.dumps({**settings, "torch": torch.__version__, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
