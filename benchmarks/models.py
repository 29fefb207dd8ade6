"""Training steps of whole models: peak memory and tokens a second. One model, which each contender changes in turn.

A step is forward with labels, backward, the optimizer if there is one, and dropping the gradients. As in Trainer,
nothing but the loss is kept of the model's output, so that no logits live during backward that it does not need. A
case is a line of a preset, a contender one of `model_contenders.CONTENDERS`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benchmarks.benchmark import Benchmark
from benchmarks.cases import GIB, Effort, Plan, planned
from benchmarks.measure import Sample, make_meter, release
from benchmarks.model_contenders import ModelContender, entrants
from benchmarks.model_problem import ModelCase, build, held_bytes, make_batch, make_optimizer
from benchmarks.plots import COLOURS, draw_entries, points
from benchmarks.results import Entry, Result, Run
from benchmarks.rounds import Entrant, Watch, compete
from benchmarks.tables import Columns, Table, gibibytes, ratio, table_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass
class ModelResult(Result):
    """The workspace is what the step takes above the model."""

    peak_bytes: int | None = None  # all that was allocated: the model, its gradients, activations, the loss
    forward_peak_bytes: int | None = None  # the same until the loss was there
    reserved_bytes: int | None = None  # what the caching allocator took for it from the device
    loss: float | None = None

    def tokens_per_second(self, tokens: int) -> float | None:
        return None if self.median_ms is None else 1e3 * tokens / self.median_ms


ModelEntry = Entry[ModelCase, ModelResult]
ModelRun = Run[ModelCase, ModelResult]


# --- cases ---

MODELS = ("Llama-3.2-1B", "Qwen3-0.6B")


def tiny() -> Plan[ModelCase]:
    """Seconds on a CPU; for the tests."""
    case = ModelCase("tiny-llama", 2, 64, dtype="float32", budgets_mib=(1,))
    return planned([case, replace(case, batch=1, sequence=128, warm_up_sequence=32)], rounds=2, seconds=1.0)


def h200_short() -> Plan[ModelCase]:
    """Half a minute of one large GPU: one model, without the long sequences."""
    contenders = ("ours", "ours-budget", "liger-loss", "stock")
    return planned([ModelCase(MODELS[0], 4, 8192, budgets_mib=(384,), contenders=contenders)], rounds=3, seconds=4.0)


def h200() -> Plan[ModelCase]:
    """About six minutes: four rounds of the short sequences, one of the long ones.

    A step of these takes some 20 s, nearly all of it attention: memory is what differs there.
    """
    short = [ModelCase(model, 4, 8192, budgets_mib=(384, 1024)) for model in MODELS]
    contenders = ("ours", "ours-budget", "liger-loss", "liger-loss-float32", "stock")
    long = [
        ModelCase(model, 1, 131072, budgets_mib=(1280,), contenders=contenders, warm_up_sequence=4096)
        for model in MODELS
    ]
    return planned(short + long, rounds=4, seconds=6.0)


PRESETS = {"tiny": tiny, "h200": h200, "h200-short": h200_short}


# --- measuring ---


@dataclass
class TrainingStep:
    """One step, and what was seen in the latest."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    batch: torch.Tensor
    call: dict[str, Any] = field(default_factory=dict)
    loss: torch.Tensor | None = None
    forward_peak_bytes: int | None = None

    def __call__(self) -> None:
        try:
            loss = self.model(input_ids=self.batch, labels=self.batch, use_cache=False, **self.call).loss
            if self.batch.is_cuda:  # the allocator keeps its books on the host: nothing is waited for
                self.forward_peak_bytes = torch.cuda.max_memory_allocated(self.batch.device)
            loss.backward()
            if self.optimizer is not None:
                self.optimizer.step()
            self.loss = loss.detach()
        finally:
            self.model.zero_grad(set_to_none=True)


def measure_model(
    case: ModelCase, contenders: Sequence[ModelContender], device: torch.device, effort: Effort, watch: Watch
) -> ModelEntry:
    release()
    model, batch = build(case, device), make_batch(case, device)
    optimizer = make_optimizer(case, model.parameters())
    if optimizer is not None:
        TrainingStep(model, optimizer, batch[:1, :8])()  # makes its states, which then belong to nobody's step
    meter = make_meter(device)

    def enter(contender: ModelContender, result: ModelResult) -> Entrant:
        """Warms up, with whole steps unless they take too long."""
        step = TrainingStep(model, optimizer, batch, contender.call)
        keep = functools.partial(take, step, result)

        @contextlib.contextmanager
        def turn() -> Iterator[None]:
            if result.reserved_bytes is None:
                release()  # what others left in the cache would be counted
            with contender.applied(model):
                yield

        if case.warm_up_sequence is not None:
            with contender.applied(model):
                TrainingStep(model, optimizer, batch[:, : case.warm_up_sequence], contender.call)()
        # Memory on a CPU is only known from a call that is not timed.
        if case.warm_up_sequence is None or not batch.is_cuda:
            with turn():
                _, sample = meter.warm_up(step)
            keep(sample)
        return Entrant(step, turn, keep)

    return Entry(case, compete(contenders, ModelResult.of, enter, device, meter, effort, watch))


def take(step: TrainingStep, result: ModelResult, sample: Sample) -> None:
    """Loss and memory of a step."""
    if step.loss is not None:
        result.loss = float(step.loss)
    if sample.workspace_bytes is None:
        return
    held = held_bytes(step.model, step.optimizer) if sample.held_bytes is None else sample.held_bytes
    result.workspace_bytes = max(result.workspace_bytes or 0, sample.workspace_bytes)
    result.peak_bytes = max(result.peak_bytes or 0, held + sample.workspace_bytes)
    if step.forward_peak_bytes is not None:
        result.forward_peak_bytes = max(result.forward_peak_bytes or 0, step.forward_peak_bytes)
    if result.reserved_bytes is None:  # of the first whole step, which found an empty cache
        result.reserved_bytes = sample.reserved_bytes


# --- tables and the picture ---


def rate(result: ModelResult, tokens: int) -> str:
    """Tokens a second, or why there is no such figure."""
    speed = result.tokens_per_second(tokens)
    if speed is not None:
        return f"{speed:.0f}"
    return "out of memory" if result.status == "oom" else "-"


def panel(entry: ModelEntry, styles: dict[str, str], axis: Axes) -> None:
    """Tokens a second against peak memory."""
    from matplotlib.ticker import ScalarFormatter

    memory, speeds = [], []
    for result in points(entry):
        memory.append((result.peak_bytes or 0) / GIB)
        speeds.append(result.tokens_per_second(entry.case.tokens) or 0.0)
        colour, style = COLOURS[result.family], styles[result.contender]
        axis.scatter(memory[-1], speeds[-1], color=colour, marker=style, s=42, label=result.title)
    exhausted = ", ".join(result.title for result in entry.results if result.status == "oom")
    if exhausted:
        axis.text(0.98, 0.02, f"out of memory: {exhausted}", ha="right", transform=axis.transAxes, fontsize=8)
    axis.set_xscale("log")
    axis.set_xlim(min(memory) / 1.3, max(memory) * 1.3)
    axis.set_ylim(0, 1.15 * max(speeds))
    axis.minorticks_off()
    axis.set_xticks(sorted({float(f"{value:.2g}") for value in (min(memory), max(memory))}))
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.set_xlabel("peak memory, GiB")
    axis.set_ylabel("tokens/s")


class ModelBenchmark(Benchmark[ModelCase, ModelResult]):
    kind = "model"
    noun = "models"
    summary = "Tokens/s, peak GiB", "model, batch x sequence"
    case_type = ModelCase
    result_type = ModelResult
    presets = PRESETS

    def measure(self, case: ModelCase, device: torch.device, effort: Effort, watch: Watch) -> ModelEntry:
        return measure_model(case, entrants(case), device, effort, watch)

    def table(self, entry: ModelEntry) -> Table:
        """Speed and memory of every contender on the training step of a model."""
        nobody = ModelResult("", "", "")
        bases = {"stock": entry.by_name("stock") or nobody, "Liger": entry.by_name("liger-loss") or nobody}
        peaks = {name: base.peak_bytes if base.samples_ms else None for name, base in bases.items()}
        columns: Columns[ModelResult] = {
            "": lambda r: r.title,
            "tokens/s": lambda r: rate(r, entry.case.tokens),
            "x stock": lambda r: ratio(bases["stock"].median_ms, r.median_ms),
            "x Liger": lambda r: ratio(bases["Liger"].median_ms, r.median_ms),
            "peak GiB": lambda r: gibibytes(r.peak_bytes),
            "GiB x stock": lambda r: ratio(r.peak_bytes, peaks["stock"]),
            "GiB x Liger": lambda r: ratio(r.peak_bytes, peaks["Liger"]),
            "forward GiB": lambda r: gibibytes(r.forward_peak_bytes),
            "reserved GiB": lambda r: gibibytes(r.reserved_bytes),
            "steps": lambda r: str(len(r.samples_ms)),
            "loss": lambda r: "-" if r.loss is None else f"{r.loss:.5f}",
        }
        return table_of(entry, [result for result in entry.results if result.status != "unavailable"], columns)

    def cell(self, entry: ModelEntry, result: ModelResult) -> str:
        memory = "" if result.peak_bytes is None or not result.samples_ms else f", {gibibytes(result.peak_bytes)}"
        return rate(result, entry.case.tokens) + memory

    def figure(self, run: ModelRun) -> Figure:
        return draw_entries(run.cases, panel, f"Training steps, {run.head['device']['name']}")


MODEL = ModelBenchmark()
