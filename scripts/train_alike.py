"""Training with flce and with stock PyTorch: a small language model on the text of this repository's documents.

    python scripts/train_alike.py --device cuda --steps 1000 --dtype bfloat16 --out curves.json --plot curves.png

All runs have the same weights, the same batches and AdamW. Runs of stock differ in the order of sequences and tokens
within a batch, and in random changes of the hidden states of at most half a rounding, because another order of sums
seldom changes a number that is rounded to half precision. These runs give the spread. The reference is the mean of the
runs of stock in float32. A run of flce is alike if its distance from the reference is at most three times the largest
distance of a run of stock in the same dtype, up to each step. (In half precision only stock rounds logits.)
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flce
from flce.testing.models import tiny_model

ROOT = Path(__file__).resolve().parents[1]
FACTOR = 3.0
WINDOW = 20  # steps of which the losses are averaged
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RUNS: dict[str, flce.ChunkOptions | None] = {
    "flce": flce.ChunkOptions(),
    "flce, 64 MiB": flce.ChunkOptions(max_workspace_bytes="64MiB"),
    "flce, vocab": flce.ChunkOptions(strategy="vocab"),
}
BFLOAT16_RUNS: dict[str, flce.ChunkOptions | None] = {"flce, E4M3": flce.ChunkOptions(grad_dtype=torch.float8_e4m3fn)}


def token_ids(vocab: int) -> Tensor:
    """Return the words of the documents as ids, by frequency. Id 0 is any other word."""
    text = "\n".join(file.read_text() for file in sorted((ROOT / "docs").glob("*.md")))
    words = re.findall(r"\w+|[^\w\s]", text)
    ids = {word: rank for rank, (word, _) in enumerate(Counter(words).most_common(vocab - 1), 1)}
    return torch.tensor([ids.get(word, 0) for word in words])


def train(
    steps: int,
    dtype: str,
    device: str,
    *,
    options: flce.ChunkOptions | None = None,
    order: int = 0,
    vocab: int = 4096,
    hidden: int = 256,
    batch: tuple[int, int] = (16, 128),
) -> list[float]:
    """Return the loss of each step. `options` None: stock. `order`: the number of an order of the tokens."""
    data, count = token_ids(vocab), batch[0] * batch[1]
    sizes: Any = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": 2 * hidden}
    model = tiny_model(seed=0, **sizes, max_position_embeddings=batch[1]).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler(device, enabled=dtype == "float16", init_scale=2.0**12)
    draw, shuffle = torch.Generator().manual_seed(1), torch.Generator().manual_seed(order)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(data) - batch[1] - 1, (batch[0],), generator=draw)
        window = data[starts[:, None] + torch.arange(batch[1] + 1)].to(device)
        permutation = torch.arange(count)
        if order:
            window, permutation = (
                window[torch.randperm(batch[0], generator=shuffle)],
                torch.randperm(count, generator=shuffle),
            )
        with torch.autocast(device, DTYPES[dtype], enabled=dtype != "float32"):
            x = model.model(window[:, :-1]).last_hidden_state.flatten(0, 1)
            y, weight = window[:, 1:].flatten(), model.lm_head.weight
            loss: Any
            if order:
                noise = torch.rand(x.shape, generator=shuffle).to(device) * torch.finfo(DTYPES[dtype]).eps / 4
                x, y = (x * (1.0 + noise))[permutation.to(device)], y[permutation.to(device)]
            if options is None:
                loss = F.cross_entropy(F.linear(x, weight).float(), y)
            else:
                loss = flce.fused_linear_cross_entropy(x, weight, y, options=options)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    return losses


def smooth(losses: Sequence[float]) -> Tensor:
    """Return the means of the last WINDOW steps."""
    total = F.pad(torch.tensor(losses, dtype=torch.float64).cumsum(0), (1, 0))
    steps = torch.arange(1, len(losses) + 1)
    first = (steps - WINDOW).clamp_min(0)
    return (total[steps] - total[first]) / (steps - first)


Curves = Sequence[Sequence[float]]


def worst_share(curve: Sequence[float], stock: Curves, exact: Curves) -> float:
    """Return the largest distance of a curve from the mean of the curves `exact`, divided by the allowed distance."""
    reference = torch.stack([smooth(each) for each in exact]).mean(0)
    spread = torch.stack([(smooth(each) - reference).abs() for each in stock]).amax(0).cummax(0).values
    return float(((smooth(curve) - reference).abs() / (FACTOR * spread + 1e-6 * reference)).max())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seeds", type=int, default=5, help="runs of stock")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--plot", type=Path, default=None)
    arguments = parser.parse_args()
    how = (arguments.steps, arguments.dtype, arguments.device)
    curves = {f"stock {order}": train(*how, order=order) for order in range(arguments.seeds)}
    stock = exact = list(curves.values())
    if arguments.dtype != "float32":
        exact = [train(arguments.steps, "float32", arguments.device, order=order) for order in range(arguments.seeds)]
    runs = RUNS | (BFLOAT16_RUNS if arguments.dtype == "bfloat16" else {})
    curves |= {name: train(*how, options=options) for name, options in runs.items()}
    shares = {name: worst_share(curves[name], stock, exact) for name in runs}
    for name, losses in curves.items():
        note = f", {shares[name]:.2f} of the allowed distance" if name in shares else ""
        print(f"{name:15} first {losses[0]:.4f}, last {float(smooth(losses)[-1]):.4f}{note}", flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(curves))
    if arguments.plot is not None:
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        for name, losses in curves.items():
            axes.plot(smooth(losses), label=name, color="0.75" if name.startswith("stock") else None, linewidth=1)
        axes.set(xlabel="step", ylabel=f"loss, mean of {WINDOW} steps", title=f"{arguments.dtype}, {arguments.device}")
        axes.legend()
        figure.savefig(arguments.plot, dpi=150)
    return int(max(shares.values()) > 1.0)


if __name__ == "__main__":
    raise SystemExit(main())
