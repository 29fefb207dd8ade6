"""The table of gains in README.md: figures of flce and of others, each row from one result file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import tables
from benchmarks.benchmark import Benchmark
from benchmarks.grpo import GRPO, TRAINING
from benchmarks.logprobs import LOGPROBS
from benchmarks.models import MODEL, tokens_per_second
from benchmarks.operator import OPERATOR, OURS, products_ms
from benchmarks.runs import BenchResult, Entry, Run
from benchmarks.small_card import SMALL_CARD
from benchmarks.tables import NONE, Table, format_or_dash
from flce.core.sizes import GIB

Figure = Callable[[Entry, BenchResult], str]  # the text of a result, NONE without a figure
LIGERS_LOSS = {"liger-loss": "Liger's loss", "stock": "stock"}
IN_A_MODEL = {"liger": "all of Liger", **LIGERS_LOSS}
OURS_IN_A_MODEL = {
    "ours-budget-256": "in 256 MiB of workspace",
    "ours-liger-layers": "with Liger's layers",
    "ours-e4m3-liger-layers": "with Liger's layers and FP8 gradients",
}
OF_A_HEAD = {
    "torch-compile": "`torch.compile`",
    "torch-kernel": "PyTorch's `linear_cross_entropy`",  # if PyTorch is new enough
    "liger-hopper": "Liger's Hopper kernel",
    "quack": "QuACK",
    "liger": "Liger",
    "cce": "Cut Cross-Entropy",
    "stock": "stock",
}
NEWEST = {name: OF_A_HEAD[name] for name in ("torch-kernel", "liger-hopper", "quack")}
OF_TOKENS = {"trl": "TRL", "liger-hopper": "Liger's Hopper kernel", "verl": "verl"}
OF_A_GRPO_STEP = {"trl": "TRL", "liger": "Liger's GRPO loss", "stock": "all logits"}

LONGEST: Figure = lambda entry, result: tables.format_or_dash("{:,}".format)(result.tokens)  # noqa: E731
PEAK: Figure = lambda entry, result: format_or_dash(lambda size: f"{size / GIB:.1f}")(result.peak_bytes)  # noqa: E731
SPEED: Figure = lambda entry, result: format_or_dash("{:,.0f}".format)(tokens_per_second(result, entry.case))  # noqa: E731
TIME: Figure = lambda entry, result: tables.ratio(result.median_ms, products_ms(entry))  # noqa: E731
MILLISECONDS: Figure = lambda entry, result: tables.milliseconds(result.median_ms)  # noqa: E731
WORKSPACE: Figure = lambda entry, result: tables.mebibytes(result.workspace_bytes)  # noqa: E731


def speed_and_peak(entry: Entry, result: BenchResult) -> str:
    return NONE if result.median_ms is None else f"{SPEED(entry, result)} ({PEAK(entry, result)})"


def gradient_error(entry: Entry, result: BenchResult) -> str:
    """Return the larger of the errors of dX and dW."""
    errors = [error for name, error in (result.errors or {}).items() if name != "loss"]
    return tables.relative(max(errors)) if errors else NONE


@dataclass(frozen=True)
class Gain:
    """A row of the table. `case` selects the case of the file by the values of fields."""

    title: str
    benchmark: Benchmark
    file: str
    figure: Figure
    others: Mapping[str, str]
    case: Mapping[str, object]
    variants: Mapping[str, str] = field(default_factory=dict)
    """Other contenders of flce, by the name of the contender."""

    def row(self, folder: Path, link: str) -> list[str]:
        run = self.benchmark.load(folder / self.file)
        entry = next(e for e in run.cases if all(getattr(e.case, name) == value for name, value in self.case.items()))

        def figures(contenders: Mapping[str, str]) -> list[str]:
            found = {name: self.figure(entry, entry.by_name(contender)) for contender, name in contenders.items()}
            return [f"{name} {figure}".lstrip() for name, figure in found.items() if figure != NONE]

        source = f"[{device_of(run)}, {run.head['date'][:10]}]({link}/{self.file})"
        return [self.title, *(", ".join(figures(side)) for side in ({OURS: "", **self.variants}, self.others)), source]


def device_of(run: Run) -> str:
    return str(run.head["device"]["name"]).removeprefix("NVIDIA ").partition(" ")[0]


LLAMA, QWEN, HEAD = "Llama-3.2-1B", "Qwen3-0.6B", {"shape": (4096, 4096, 128256)}
LONGEST_SEQUENCE = f"Longest sequence of {LLAMA} on an H100 limited to 23 GiB, batch 1"
TITLE_OF_HEAD = "Head of 4096 x 4096 x 128256"
CARD = SMALL_CARD, "small-card-h100.json", LONGEST, LIGERS_LOSS
ONE_HEAD = OPERATOR, "h200-curve.json"
FULL = {"model": LLAMA, "checkpointing": True, "lora_rank": 0}
STEPS = (
    Gain(
        f"{model}, 4 x 8192 tokens{', no checkpointing' * (not checkpointing)}: tokens/s (peak GiB)",
        *(MODEL, "model-fp8-h200.json" if checkpointing else "model-h200-pages.json", speed_and_peak, IN_A_MODEL),
        *({**FULL, "model": model, "checkpointing": checkpointing}, OURS_IN_A_MODEL),
    )
    for checkpointing in (True, False)
    for model in (LLAMA, QWEN, *(["Gemma-3-270m"] * checkpointing))
)
GAINS = (
    Gain(f"{LONGEST_SEQUENCE}, tokens", *CARD, FULL),
    Gain(f"{LONGEST_SEQUENCE} without checkpointing, tokens", *CARD, {**FULL, "checkpointing": False}),
    *STEPS,
    Gain(f"{TITLE_OF_HEAD}: relative time", *ONE_HEAD, TIME, OF_A_HEAD, HEAD),
    Gain(f"{TITLE_OF_HEAD}: workspace, MiB", *ONE_HEAD, WORKSPACE, OF_A_HEAD, HEAD),
    Gain(f"{TITLE_OF_HEAD}: relative error of the gradients", *ONE_HEAD, gradient_error, OF_A_HEAD, HEAD),
    Gain(f"{TITLE_OF_HEAD}, newer kernels: relative time", OPERATOR, "h200-rivals.json", TIME, NEWEST, HEAD),
    Gain(
        "Log-probabilities and entropies, 8192 x 4096 x 128256: relative time",
        *(LOGPROBS, "h200-logprobs.json", TIME, OF_TOKENS, {"shape": (8192, 4096, 128256)}),
    ),
    Gain(
        f"GRPO step of {LLAMA} in TRL, ms",
        *(GRPO, "h200-grpo.json", MILLISECONDS, OF_A_GRPO_STEP, {"part": TRAINING}),
    ),
)


def gains(folder: Path, link: str) -> str:
    """Return the table from the result files of the folder, to which pages have the path `link`. Skip missing files."""
    rows = [gain.row(folder, link) for gain in GAINS if (folder / gain.file).exists()]
    return Table("", ["", "flce", "others", "measured"], rows).grid()
