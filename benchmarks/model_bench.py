"""Measures all contenders on the training step of a model: one model, which each changes for its turns.

A step is forward with labels, backward, the optimizer if there is one, and dropping the gradients. As in Trainer,
nothing but the loss is kept of the model's output, so that no logits live during backward that it does not need.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.cases import Effort
from benchmarks.contenders import Outcome
from benchmarks.measure import Meter, Sample, make_meter, release
from benchmarks.model_contenders import ModelContender, entrants
from benchmarks.models import ModelCase, build, held_bytes, make_batch, make_optimizer
from benchmarks.results import ModelCaseResult, ModelResult
from benchmarks.rounds import Entrant, Report, attempt, interleave, never, skip_unmeasured


class TrainingStep:
    """One step, and what was seen in the latest."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        batch: torch.Tensor,
        call: dict[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.batch = batch
        self.call = call or {}
        self.loss: torch.Tensor | None = None
        self.forward_peak_bytes: int | None = None

    def __call__(self) -> Outcome:
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
        return Outcome(self.loss)


def run_model_case(
    case: ModelCase,
    device: torch.device,
    effort: Effort,
    report: Report,
    expired: Callable[[], bool] = never,
    contenders: list[ModelContender] | None = None,
) -> ModelCaseResult:
    """Failures of a contender, out of memory above all, are part of the result; the others go on without it."""
    contenders = entrants(case) if contenders is None else contenders
    outcome = ModelCaseResult(case)
    report("weights", 0.0)
    release()
    model, batch = build(case, device), make_batch(case, device)
    optimizer = make_optimizer(case, model.parameters())
    if optimizer is not None:
        TrainingStep(model, optimizer, batch[:1, :8])()  # makes its states, which then belong to nobody's step
    meter = make_meter(device)

    turns = len(contenders) * (1 + effort.rounds)
    ready = []
    for index, contender in enumerate(contenders):
        result = ModelResult(contender.name, contender.title, contender.family)
        outcome.results.append(result)
        if expired():
            continue
        report(f"{contender.name}: warm-up", index / turns)
        entrant = enter(contender, case, TrainingStep(model, optimizer, batch, contender.call), meter, result)
        if entrant is not None:
            ready.append(entrant)
    interleave(ready, meter, effort, report, len(contenders), turns, expired)

    skip_unmeasured(outcome.results)
    report("done", 1.0)
    return outcome


def enter(
    contender: ModelContender, case: ModelCase, step: TrainingStep, meter: Meter, result: ModelResult
) -> Entrant | None:
    """Warms up, with whole steps unless they take too long."""
    model, batch = step.model, step.batch
    reason = contender.unavailable(batch.device)
    if reason is not None:
        result.status, result.reason = "unavailable", reason
        return None

    keep = functools.partial(take, step, result)

    @contextlib.contextmanager
    def turn() -> Iterator[None]:
        if result.reserved_bytes is None:
            release()  # what others left in the cache would be counted
        with contender.applied(model):
            yield

    def warm_up() -> Entrant:
        if case.warm_up_sequence is not None:
            with contender.applied(model):
                TrainingStep(model, step.optimizer, batch[:, : case.warm_up_sequence], contender.call)()
        # Memory on a CPU is only known from a call that is not timed.
        if case.warm_up_sequence is None or not batch.is_cuda:
            with turn():
                _, sample = meter.warm_up(step)
            keep(sample)
        return Entrant(result, step, turn, keep)

    return attempt(result, warm_up)


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
