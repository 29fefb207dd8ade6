"""Random programs on lazy logits: see `tests.huggingface.fuzz`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from typing import Any

from tests.huggingface import fuzz
from tests.search.driver import Call, Errors, Kind, Mismatch

SETUP = tuple(field.name for field in fields(fuzz.Setup))
DEFAULTS: dict[str, Any] = {**asdict(fuzz.Setup()), "steps": (), "roots": (), "read_first": False, "layout": False}


def call_of(program: fuzz.Program) -> Call:
    rest = {"steps": program.steps, "roots": program.roots, "read_first": program.read_first}
    return {**asdict(program.setup), **rest}


def program_of(call: Mapping[str, Any]) -> fuzz.Program:
    full = {**DEFAULTS, **call}
    setup = fuzz.Setup(**{name: full[name] for name in SETUP})
    return fuzz.Program(setup, full["steps"], full["roots"], full["read_first"])


def draw(rng: random.Random, compiled: random.Random, device: str) -> Call:
    return call_of(fuzz.draw(rng.randrange(1 << 40)))


def simpler(call: Call, defaults: Mapping[str, Any]) -> Iterator[Call]:
    return map(call_of, fuzz.simpler(program_of(call)))


def kind(run: type[fuzz.Run] = fuzz.Run) -> Kind:
    """Return the kind. `run`: the class that runs a program on the patched model."""

    def check(call: Call, device: str, errors: Errors) -> None:
        difference = fuzz.compare(program_of(call), fuzz.Comparison(layout=call["layout"], run=run))
        if difference is not None:
            raise Mismatch(difference.kind, difference.text)

    return Kind("lazy", DEFAULTS, draw, check, simpler, share=4.0)


KIND = kind()
