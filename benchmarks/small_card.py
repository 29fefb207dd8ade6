"""The longest sequence that trains on a card of 24 GB, simulated on a larger GPU: stock, Liger's loss and flce.

PyTorch may allocate `MEMORY` of the GPU. A profile (docs/devices.md) sets the device record of `KIND`, so plans and
launches are those of such a card. On a CPU the peak of a step of a tiny model is limited.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import models
from benchmarks.benchmark import plan_cases
from benchmarks.measure import BenchMeter, Prepared, ReadyContender, release
from benchmarks.memory import profile_memory
from benchmarks.models import ModelCase, ModelContender, TrainingStep
from benchmarks.runs import BenchResult, Entry
from benchmarks.tables import Columns, Table, failure_notes, format_or_dash, ratio, tabulate
from flce.core.devices import KNOWN_KINDS, device_record
from flce.core.sizes import GIB, MIB
from flce.huggingface.estimate.training_memory import Training, TrainingMemory, Variant
from flce.planning.plan import resolve_device
from flce.tools.machine import DTYPES

KIND, MEMORY = "RTX-4090", 23 * GIB
TINY_MEMORY = 4 * MIB  # of a tiny model's step on a CPU
CLOSE = 0.02  # the search ends if a length that is longer by this share does not train
MULTIPLE = 8  # lengths are multiples of so many tokens
QUICK = 3.0  # if the first step takes at most so many seconds, a second step follows, in which memory has gaps


@dataclass(frozen=True)
class CardCase(ModelCase):
    @property
    def is_timed(self) -> bool:
        return False

    @property
    def title(self) -> str:
        return super().title.replace("1 x 0 tokens, ", "")


def longest(trains: Callable[[int], bool], guess: int) -> int:
    """Return the longest sequence that trains. Steps away from the guess grow until its bounds are known."""
    trained, failed, factor, units = 0, None, 1 + CLOSE, max(1, guess // MULTIPLE)
    while failed is None or failed - trained > max(1, CLOSE * trained):
        if trains(units * MULTIPLE):
            trained = units
        else:
            failed = units
        if failed is not None and trained:
            units = (trained + failed) // 2
        else:
            units = max(trained + 1, int(units * factor)) if failed is None else max(1, int(failed / factor))
            factor *= factor
        if units == failed:
            break
    return trained * MULTIPLE


@functools.cache
def predicted(case: ModelCase, patched: bool) -> int:
    """Return the prediction of ``flce plan --device-kind RTX-4090 --gpu-memory 23GiB``, with adapters."""
    from transformers import AutoConfig

    gpu = resolve_device(torch.device("cuda"), KIND, MEMORY)
    training = Training(case.batch, DTYPES[case.dtype], optimizer=case.optimizer)
    estimate = TrainingMemory(AutoConfig.for_model(**models.ARCHITECTURES[case.model]), training, gpu)
    models.add_lora(estimate.model, case.lora_rank)
    return estimate.find_longest(Variant(patched, case.checkpointing), MEMORY)[0]


def prepare(case: CardCase, device: torch.device) -> Prepared:
    cuda = device.type == "cuda"

    def get_ready(contender: ModelContender, result: BenchResult) -> ReadyContender:
        guess = predicted(case, contender.family != "stock") if cuda else 64
        result.predicted_tokens = guess if cuda and contender.family != "peer" else None
        release()
        model = models.build(case, device)
        kind: Any = models.OPTIMIZERS[case.optimizer]
        optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=0.0)

        def steps(tokens: int) -> None:
            batch = models.make_batch(replace(case, sequence=tokens), device)
            step = TrainingStep(model, optimizer, batch, contender.call)
            begin = time.monotonic()
            step()
            if cuda:
                torch.cuda.synchronize(device)
            if time.monotonic() - begin < QUICK:
                step()

        def trains(tokens: int) -> bool:
            if not cuda:
                held = models.held_bytes(model, optimizer)
                return held + profile_memory(lambda: steps(tokens), device).peak <= TINY_MEMORY
            with contextlib.suppress(torch.OutOfMemoryError):
                steps(tokens)
                return True
            release()  # after the exception is gone, which refers to the step
            return False

        with contender.applied(model):
            steps(MULTIPLE)  # allocates the optimizer's states
            result.tokens = longest(trains, guess)
        return ReadyContender(lambda: None)

    return BenchMeter(device), get_ready


def simulate(device: torch.device) -> None:
    """Give a GPU the device record and the memory of a `KIND`, for this process."""
    if device.type != "cuda":
        return
    record = KNOWN_KINDS[KIND]._replace(name=torch.cuda.get_device_name(device), memory=MEMORY)
    fields = {name: value for name, value in record._asdict().items() if name != "profile"}
    profile = Path(tempfile.mkdtemp(), "small-card.json")
    profile.write_text(json.dumps(fields))
    os.environ["FLCE_PROFILE"] = str(profile)
    assert device_record(device).profile == str(profile), "the profile must be set before the first plan"
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(MEMORY / total, device)


tokens = format_or_dash("{:,}".format)


def table(entry: Entry) -> Table:
    columns: Columns = {
        "": lambda r: r.title,
        "longest sequence, measured": lambda r: tokens(r.tokens),
        "predicted": lambda r: tokens(r.predicted_tokens),
        "predicted / measured": lambda r: ratio(r.predicted_tokens, r.tokens),
    }
    return tabulate(entry.case.title, [r for r in entry.results if r.tokens], columns, failure_notes(entry))


NAMES = ("ours", "stock", "liger-loss")
FULL = CardCase("Llama-3.2-1B", 1, 0, optimizer="sgd-momentum", contenders=NAMES, checkpointing=False)
CASES = (FULL, replace(FULL, checkpointing=True, lora_rank=16), replace(FULL, checkpointing=True))
TINY = tuple(replace(case, model="tiny-llama", dtype="float32") for case in CASES[:2])

SMALL_CARD = replace(
    models.MODEL,
    kind="small-card",
    about="The longest sequences that train on a card of 24 GB, simulated on a larger GPU.",
    case_type=CardCase,
    presets={"tiny": lambda: plan_cases(TINY, 1, 0.0), "h200": lambda: plan_cases(CASES, 1, 0.0)},
    contenders=models.contenders_of,  # the peer is last
    prepare=prepare,
    begin=simulate,
    table=table,
    tables=lambda run, brief: [table(entry) for entry in run.cases],
)
