"""The two tables of README.md: what fits on a card, and the other losses. Each row is from one result file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import tables
from benchmarks.benchmark import Benchmark
from benchmarks.contenders import SAMPLED
from benchmarks.grpo import GRPO, TRAINING
from benchmarks.operator import OPERATOR, OURS, products_ms
from benchmarks.runs import BenchResult, Run
from benchmarks.small_card import SMALL_CARD
from benchmarks.split_head import SPLIT_HEAD
from benchmarks.tables import NONE, Table, format_or_dash
from flce.core.sizes import GIB

Source = Callable[[Path, str], list[str]]  # from the folder of results and its link to a row of the table


def predicted(title: str, file: str) -> Source:
    """Return a row of a stored output of ``flce plan --json``, with gradient checkpointing."""

    def row(folder: Path, link: str) -> list[str]:
        steps = json.loads((folder / file).read_text())["steps"]
        longest = {step["patched"]: f"{step['longest_sequence']:,}" for step in steps if step["checkpointing"]}
        return [title, longest[False], NONE, longest[True], f"[predicted]({link}/{file})"]

    return row


def measured(
    title: str,
    benchmark: Benchmark,
    file: str,
    names: Sequence[str | None],
    figure: Callable[[BenchResult], str],
    **case: object,
) -> Source:
    """Return a row of the case of a result file that has these values of fields. names: of the contenders; None: not
    measured."""

    def row(folder: Path, link: str) -> list[str]:
        run = benchmark.load(folder / file)
        entry = run.find(**case)
        figures = [NONE if name is None else figure(entry.by_name(name)) for name in names]
        return [title, *figures, f"[{device_of(run)}, {run.head['date'][:10]}]({link}/{file})"]

    return row


def device_of(run: Run) -> str:
    return str(run.head["device"]["name"]).removeprefix("NVIDIA ").partition(" ")[0]


def tokens(result: BenchResult) -> str:
    return format_or_dash("{:,}".format)(result.tokens)


def peak(result: BenchResult) -> str:
    return format_or_dash(lambda size: f"{size / GIB:.1f}")(result.peak_bytes or result.workspace_bytes)


CARD = SMALL_CARD, "small-card-h100.json", ("stock", "liger-loss", OURS), tokens
STEP = GRPO, "h200-grpo.json", ("stock", "trl", OURS), peak
LAST_STAGE = SPLIT_HEAD, "last-stage-2-h200.json", ("megatron", None, "ours-main-grad"), peak
CARDS = (
    predicted("24 GB (RTX 4090): Llama-3.1-8B, LoRA 16 on q, v", "plan-llama-3.1-8b-lora-4090.json"),
    predicted("24 GB (RTX 4090): Llama-3.1-8B, QLoRA 16 on q, v", "plan-llama-3.1-8b-qlora-4090.json"),
    measured("24 GB (simulated): Llama-3.2-1B, LoRA 16 on all layers", *CARD, lora_rank=16),
    predicted("80 GB (H100): Llama-3.1-8B, LoRA 16 on q, v", "plan-llama-3.1-8b-lora-h100.json"),
    predicted("8 x 80 GB (H100), FSDP: Llama-3.1-8B, all weights", "plan-llama-3.1-8b-fsdp.json"),
    measured("GRPO step in TRL, Llama-3.2-1B, 8 x 4096 tokens: peak, GiB", *STEP, part=TRAINING),
    measured(
        "Megatron's loss into main_grad, 8192 x 262144 logits, 2 GPUs: workspace, GiB",
        *LAST_STAGE,
        head="gemma3 english",
    ),
)


def cards(folder: Path, link: str) -> str:
    """Return the table of what fits, from the result files of the folder, to which pages have the path `link`."""
    rows = [row(folder, link) for row in CARDS]
    return Table("", ["longest sequence, tokens", "stock", "best other", "flce", "source"], rows).grid()


HEAD: dict[str, object] = {"shape": (8192, 4096, 262144), "head": "gemma3 english"}
HEAD_FILE, SAMPLED_FILE = "real-heads-h200.json", "h200-sampled.json"
# The name of a contender: its title, what it lacks, and when to use it. None: it has no result in the file.
OTHERS: tuple[tuple[str | None, str, str, str], ...] = (
    (OURS, "flce", "second derivatives", "you train on an NVIDIA GPU"),
    (SAMPLED, "flce, `sample_below=2**-12`", "exact gradients: they have noise", "you fine-tune a large head"),
    ("ours-256MiB", "flce, 256 MiB budget", "speed: computes logits twice", "memory is short"),
    ("liger", "Liger's loss", "LoRA on the head, a limit in bytes", "your GPU is AMD, Intel or Ascend"),
    ("liger-float32-8x", "Liger's loss, float32 sums, 8x chunk", "the same", "the same"),
    ("trl", "TRL's kernel", "unrounded logits", "you use only TRL's trainers"),
    (None, "Unsloth's loss", "use outside of Unsloth", "you train with Unsloth"),
    ("cce", "Cut Cross-Entropy", "gradients below a threshold", "few MiB are free"),
    (None, "PyTorch's `linear_cross_entropy`", "adapters, patched models", "you want no other package"),
    ("torch-compile", "`torch.compile`", "chunks; it stores logits", "the logits fit into memory"),
    ("stock", "stock", "chunks; it stores logits", "you need logits or second derivatives"),
)


def gradient_error(result: BenchResult) -> str:
    """Return the larger of the errors of dX and dW."""
    return tables.relative(max(error for name, error in (result.errors or {}).items() if name != "loss"))


def others(folder: Path, _: str) -> str:
    """Return the table of the other losses, with the times, workspaces and errors of one real head."""
    # Ratios of one run each.
    of_all, of_sampled = (OPERATOR.load(folder / file).find(**HEAD) for file in (HEAD_FILE, SAMPLED_FILE))

    def figures(name: str) -> list[str]:
        entry = of_sampled if name == SAMPLED else of_all
        result = entry.by_name(name)
        time = tables.ratio(result.median_ms, products_ms(entry))
        return [time, tables.mebibytes(result.workspace_bytes), gradient_error(result)]

    rows = [[title, *(figures(name) if name else [NONE] * 3), lacks, when] for name, title, lacks, when in OTHERS]
    names = ["", "relative time", "workspace, MiB", "gradient error", "lacks", "use it if"]
    return Table("", names, rows).grid()
