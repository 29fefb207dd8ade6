"""Training with flce and with stock PyTorch: a small language model on the text of this repository's documents.

    python scripts/train_alike.py --dtype bfloat16 --out bfloat16.json   # and float32, float16
    python scripts/train_alike.py --compare float32.json bfloat16.json float16.json --plot curves.png --out result.json
    python scripts/train_alike.py --draw result.json --plot curves.png    # the picture again
    python scripts/train_alike.py --weights-and-data --out seeds.json    # five seeds, also with sampled gradients

All runs have the same weights, the same batches and AdamW. Runs of stock differ in the order of sequences and tokens
within a batch, and in random changes of the hidden states of at most half a rounding, because another order of sums
seldom changes a number that is rounded to half precision. These runs give the spread. The reference is the mean of the
runs of stock in float32. Differences grow exponentially until they are as large as the spread, sooner or later. So a
run of flce is alike if its largest distance from the reference, relative to the loss, is at most twice the largest one
of the runs of stock in the same dtype. (In half precision only stock rounds logits.)
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
from flce.testing import tiny_model

ROOT = Path(__file__).resolve().parents[1]
FACTOR = 2.0
WINDOW = 20  # steps of which the losses are averaged
STORED_STEPS = 10  # a result has the mean of every tenth step, which is enough for a plot
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RUNS: dict[str, flce.ChunkOptions | None] = {
    "flce": flce.ChunkOptions(),
    "flce, 64 MiB": flce.ChunkOptions(max_workspace_bytes="64MiB"),
    "flce, vocab": flce.ChunkOptions(strategy="vocab"),
}
# Name in the picture, colour and width of the lines of runs; all others are runs of stock.
LABELS: dict[str, tuple[str, str, float]] = {
    "flce": ("flce", "#0072b2", 1.6),
    "flce, 64 MiB": ("flce, budget of 64 MiB", "#d55e00", 1.6),
    "flce, vocab": ("flce, blocks of classes", "#009e73", 1.6),
}
SEED_RUNS: dict[str, flce.ChunkOptions | None] = {
    "stock": None,
    "flce": flce.ChunkOptions(),
    "flce, sampled": flce.ChunkOptions(sample_below=2.0**-12),
}


def token_ids(vocab: int, files: str) -> Tensor:
    """Return the words of files as ids, by frequency. Id 0 is any other word. `files`: a pattern."""
    text = "\n".join(file.read_text() for file in sorted(ROOT.glob(files)))
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
    seed: int = 0,
    vocab: int = 16384,
    hidden: int = 256,
    batch: tuple[int, int] = (16, 128),
    files: str = "docs/*.md",
) -> list[float]:
    """Return the loss of each step. `options` None: stock. `order`: the number of an order of the tokens.

    `seed` draws the weights and the batches.
    """
    data, count = token_ids(vocab, files), batch[0] * batch[1]
    sizes: Any = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": 2 * hidden}
    model = tiny_model(seed=seed, **sizes, max_position_embeddings=batch[1]).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler(device, enabled=dtype == "float16", init_scale=2.0**12)
    draw, shuffle = torch.Generator().manual_seed(1 + seed), torch.Generator().manual_seed(order)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(data) - batch[1] - 1, (batch[0],), generator=draw)
        window = data[starts[:, None] + torch.arange(batch[1] + 1)].to(device)
        permutation = torch.arange(count)
        if order:
            window = window[torch.randperm(batch[0], generator=shuffle)]
            permutation = torch.randperm(count, generator=shuffle)
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

    def distance(losses: Sequence[float]) -> float:
        return float(((smooth(losses) - reference) / reference).abs().max())

    return distance(curve) / (FACTOR * max(map(distance, stock)))


def train_all(steps: int, dtype: str, device: str, seeds: int) -> dict[str, Any]:
    """Return the losses of all runs of a dtype, and how they were made."""
    curves = {f"stock {order}": train(steps, dtype, device, order=order) for order in range(seeds)}
    curves |= {name: train(steps, dtype, device, options=options) for name, options in RUNS.items()}
    name = torch.cuda.get_device_name() if device == "cuda" else device
    return {"dtype": dtype, "device": name, "torch": torch.__version__, "steps": steps, "curves": curves}


def train_seeds(steps: int, device: str, seeds: int) -> dict[str, Any]:
    """Return the mean loss of the last fifth of the steps for each seed, in bfloat16."""
    means = {}
    for name, options in SEED_RUNS.items():
        curves = [train(steps, "bfloat16", device, options=options, seed=seed) for seed in range(seeds)]
        means[name] = [sum(curve[-steps // 5 :]) / (steps // 5) for curve in curves]
        print(f"{name:15} {' '.join(f'{mean:.4f}' for mean in means[name])}", flush=True)
    name = torch.cuda.get_device_name() if device == "cuda" else device
    return {"dtype": "bfloat16", "device": name, "torch": torch.__version__, "steps": steps, "means": means}


def compare(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return, for each dtype and run of flce, the distance from the reference, divided by the allowed distance."""

    def stock(result: dict[str, Any]) -> Curves:
        return [curve for name, curve in result["curves"].items() if name.startswith("stock")]

    exact = next(stock(each) for each in results if each["dtype"] == "float32")
    return {
        each["dtype"]: {
            name: worst_share(curve, stock(each), exact)
            for name, curve in each["curves"].items()
            if not name.startswith("stock")
        }
        for each in results
    }


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot the stored means of each dtype as differences from the mean of stock in float32."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    curves = next(each["curves"] for each in results if each["dtype"] == "float32")
    stock = torch.tensor([curve for name, curve in curves.items() if name.startswith("stock")])
    reference, steps = stock.mean(0), STORED_STEPS * torch.arange(1, stock.shape[1] + 1)
    # The letters are legible in a picture of 900 pixels, the width of a page.
    figure, panels = pyplot.subplots(1, len(results), figsize=(9.6, 3.8), layout="constrained", sharey=True)
    for axes, each in zip(panels, results, strict=True):
        for name, losses in each["curves"].items():
            label, color, width = LABELS.get(name, ("stock, five orders of the tokens", "0.7", 1.0))
            axes.plot(steps, torch.tensor(losses) - reference, label=label, color=color, linewidth=width)
        axes.set_title(each["dtype"], fontsize=12)
        axes.set_xlabel("step", fontsize=11)
    panels[0].set_ylabel(f"loss above stock in float32,\nmean of {WINDOW} steps", fontsize=11)
    labelled = dict(zip(*reversed(panels[0].get_legend_handles_labels()), strict=True))
    legend = figure.legend(
        labelled.values(), labelled, loc="outside lower center", ncols=len(labelled), fontsize=11, frameon=False
    )
    for line in legend.get_lines():
        line.set_linewidth(3)
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seeds", type=int, default=5, help="runs of stock")
    parser.add_argument("--weights-and-data", action="store_true", help="other seeds, also with sampled gradients")
    parser.add_argument("--compare", type=Path, nargs="+", default=[], help="results of dtypes, one of them float32")
    parser.add_argument("--draw", type=Path, default=None, help="the result of --compare, for --plot")
    parser.add_argument("--plot", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=None, help="needed without --draw")
    arguments = parser.parse_args()
    if arguments.draw is not None and arguments.plot is not None:
        plot(json.loads(arguments.draw.read_text())["runs"], arguments.plot)
        return 0
    if arguments.out is None:
        parser.error("give --out, or --draw and --plot")
    if arguments.weights_and_data:
        arguments.out.write_text(json.dumps(train_seeds(arguments.steps, arguments.device, arguments.seeds)) + "\n")
        return 0
    if not arguments.compare:
        result = train_all(arguments.steps, arguments.dtype, arguments.device, arguments.seeds)
        arguments.out.write_text(json.dumps(result))
        return 0
    results = [json.loads(file.read_text()) for file in arguments.compare]
    shares = compare(results)
    for each in results:
        for name, losses in each["curves"].items():
            share = shares[each["dtype"]].get(name)
            note = "" if share is None else f", {share:.2f} of the allowed distance"
            print(f"{each['dtype']:9} {name:15} first {losses[0]:.4f}, last {float(smooth(losses)[-1]):.4f}{note}")
        means = {name: smooth(losses)[STORED_STEPS - 1 :: STORED_STEPS] for name, losses in each["curves"].items()}
        each["curves"] = {name: [round(x, 5) for x in of_run.tolist()] for name, of_run in means.items()}
    if arguments.plot is not None:
        plot(results, arguments.plot)
    arguments.out.write_text(
        json.dumps({"share of the allowed distance": shares, "window": WINDOW, "runs": results}) + "\n"
    )
    return int(max(max(of_dtype.values()) for of_dtype in shares.values()) > 1.0)


if __name__ == "__main__":
    raise SystemExit(main())
