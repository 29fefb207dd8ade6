"""The longest sequence that trains on a card of 24 GB, simulated on a larger GPU: stock, Liger's loss and flce.

    python -m benchmarks.small_card --out results/small-card.json

PyTorch may take `MEMORY` of the GPU. A profile (docs/devices.md) gives it the record of a `KIND`: plans and launches
are those of such a card, without products of our own. Beside what trained stands what `flce plan` predicts for it.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import flce
from benchmarks.measure import release
from benchmarks.models import (
    ARCHITECTURES,
    OPTIMIZERS,
    ModelCase,
    ModelContender,
    TrainingStep,
    add_lora,
    build,
    entrants,
    held_bytes,
    make_batch,
)
from benchmarks.runs import SCHEMA, described_run
from benchmarks.tables import NONE, Table
from flce.core.device_record import KNOWN
from flce.core.devices import device_record, find_device
from flce.core.sizes import GIB, MIB, size_text
from flce.huggingface.estimate.training_memory import Training, TrainingMemory, Variant
from flce.planning.device_kinds import described
from flce.tools.machine import DTYPES

KIND, MEMORY = "RTX-4090", 23 * GIB
TINY_MEMORY = 4 * MIB  # of a tiny model's step on a CPU
NAMES = ("stock", "liger-loss", "ours")
FULL = ModelCase("Llama-3.2-1B", 1, 0, optimizer="sgd-momentum", contenders=NAMES, checkpointing=False)
# What a deadline cuts off comes last.
CASES = (FULL, replace(FULL, checkpointing=True, lora_rank=16), replace(FULL, checkpointing=True))
TINY = tuple(replace(case, model="tiny-llama", dtype="float32") for case in CASES[:2])
# The length is known when one longer by this share does not train. The next after the first is longer or shorter by it.
CLOSE = 0.02
# Tokens that lengths are multiples of.
MULTIPLE = 8
# A second step follows a first that took no more seconds: memory has gaps then.
QUICK = 3.0


@dataclass(frozen=True)
class Found:
    """What was found of one contender."""

    contender: str
    title: str
    predicted: int | None
    """Tokens of a sequence, by `flce plan`; None: it plans no such step."""
    trained: int = 0
    """The longest that was tried and trains."""
    failed: int | None = None
    """The shortest that was tried and does not; None: there was no time for it."""
    status: str = "ok"


def longest(trains: Callable[[int], bool], guess: int, until: float) -> tuple[int, int | None]:
    """The longest that trains and the shortest that does not, of lengths tried from a guess on until some time."""
    trained, failed, factor, tokens = 0, None, 1 + CLOSE, _multiple(guess)
    while time.monotonic() < until:
        if trains(tokens):
            trained = tokens
        else:
            failed = tokens
        if failed is not None and failed - trained <= max(MULTIPLE, CLOSE * trained):
            break
        if failed is None or not trained:  # further and further in one direction
            tokens = _multiple(tokens * factor if failed is None else tokens / factor)
            factor *= factor
        else:
            tokens = _multiple((trained + failed) / 2)
        if tokens in (trained, failed):
            tokens = trained + MULTIPLE
    return trained, failed


def _multiple(tokens: float) -> int:
    return max(1, int(tokens) // MULTIPLE) * MULTIPLE


@functools.cache
def predicted(case: ModelCase, patched: bool) -> int:
    """As ``flce plan --device-kind RTX-4090 --gpu-memory 23GiB``, which has no adapters, says it."""
    from transformers import AutoConfig

    gpu = described(torch.device("cuda"), KIND, MEMORY)
    training = Training(case.batch, DTYPES[case.dtype], optimizer=case.optimizer)
    planned = TrainingMemory(AutoConfig.for_model(**ARCHITECTURES[case.model]), training, gpu)
    add_lora(planned.model, case.lora_rank)
    return planned.longest(Variant(patched, case.checkpointing), MEMORY).tokens


def search(case: ModelCase, contender: ModelContender, device: torch.device, until: float) -> Found:
    """The longest sequence of one contender, with a model of its own."""
    found, of_tiny = Found(contender.name, contender.title, None), device.type != "cuda"
    if (missing := contender.unavailable(device)) is not None:
        return replace(found, status=missing)
    guess = 64 if of_tiny else predicted(case, contender.family != "stock")
    if not of_tiny and contender.family != "peer":
        found = replace(found, predicted=guess)
    release()
    model = build(case, device)
    kind: Any = OPTIMIZERS[case.optimizer]
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=0.0)

    def steps(tokens: int) -> None:
        step = TrainingStep(model, optimizer, make_batch(replace(case, sequence=tokens), device), contender.call)
        begin = time.monotonic()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if time.monotonic() - begin < QUICK:
            step()

    def trains(tokens: int) -> bool:
        if of_tiny:
            return held_bytes(model, optimizer) + flce.profile_memory(lambda: steps(tokens)).peak <= TINY_MEMORY
        enough = True
        try:
            steps(tokens)
        except torch.OutOfMemoryError:
            enough = False
        release()  # where no exception holds the step any more
        return enough

    with contender.applied(model):
        steps(MULTIPLE)  # makes the optimizer's states
        trained, failed = longest(trains, guess, until)
    return replace(found, trained=trained, failed=failed)


def table(document: dict[str, Any]) -> Table:
    """Tokens of the longest sequences, for each setting."""
    rows = []
    for each in document["cases"]:
        for result in each["results"]:
            tokens = f"{result['trained']:,}" if result["status"] == "ok" else result["status"]
            more = result["failed"] is None and result["status"] == "ok"
            ratio = result["predicted"] and result["trained"] and result["predicted"] / result["trained"]
            plan = f"{result['predicted']:,}" if result["predicted"] else NONE
            figures = ("at least " * more + tokens, plan, f"{ratio:.2f}" if ratio else NONE)
            rows.append([each["setting"], result["title"], *figures])
    memory = size_text(document["card"]["memory"])
    columns = ["", "", "longest sequence, measured", "predicted", "predicted / measured"]
    return Table(f"{memory} of {document['device'].get('name', 'a CPU')}", columns, rows)


def simulate(device: torch.device, folder: str) -> None:
    """Make this process believe that the device is a card of `KIND`, and have no more memory."""
    record = KNOWN[KIND]._replace(name=torch.cuda.get_device_name(device), memory=MEMORY)
    fields = {name: value for name, value in record._asdict().items() if name != "profile"}
    profile = Path(folder, "small-card.json")
    profile.write_text(json.dumps(fields))
    os.environ["FLCE_PROFILE"] = str(profile)
    assert device_record(device).profile == str(profile), "the profile has to be there before the first plan"
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(MEMORY / total, device)


def main(
    out: Annotated[Path, typer.Option(help="Result file, written anew after every contender.")] = Path(
        "results/small-card.json"
    ),
    seconds: Annotated[float, typer.Option(help="After which no further length is tried.")] = 300.0,
) -> None:
    """The longest sequences that train in 23 GiB of a GPU; of a tiny model in 4 MiB where there is none."""
    until, device = time.monotonic() + seconds, find_device(None, ("cuda", "cpu"))
    with tempfile.TemporaryDirectory() as folder:
        cuda = device.type == "cuda"
        if cuda:
            simulate(device, folder)
        card = {"kind": KIND if cuda else "cpu", "memory": MEMORY if cuda else TINY_MEMORY}
        head = described_run(device, "python -m benchmarks.small_card", [])
        head["device"]["profile"] = head["device"].get("profile") and Path(head["device"]["profile"]).name
        document: dict[str, Any] = {"schema": SCHEMA, "kind": "small-card", **head, "card": card, "cases": []}
        for case in CASES if cuda else TINY:
            setting = case.setting.replace("1 x 0 tokens, ", "")
            results: list[dict[str, Any]] = []
            document["cases"].append({"setting": setting, "case": case.to_dict(), "results": results})
            for contender in sorted(entrants(case), key=lambda each: each.family == "peer"):
                results.append(asdict(search(case, contender, device, until)))
                typer.echo(f"{setting}: {results[-1]}", err=True)
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(document).markdown())


if __name__ == "__main__":
    typer.run(main)
