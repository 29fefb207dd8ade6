"""Random programs of 1 to 4 processes that share a head: losses whose backward passes run in any order."""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import random
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flce
from tests.distributed import split_head
from tests.processes import most_processes, world
from tests.search import arguments
from tests.search.arguments import HEAD, LOSS, Expected, by_letter, defaults
from tests.search.driver import Call, Errors, Kind, Mismatch, Refused

MOST = 4
DEFAULTS: Call = {**defaults(**LOSS, **HEAD), "processes": 2, "sequence_parallel": False}
DEFAULTS |= {"slices": False, "budget": None, "second": False, "differs": ""}
FUNCTION = flce.fused_linear_cross_entropy
PARAMETERS = inspect.signature(FUNCTION).parameters
ARGUMENTS = sorted(PARAMETERS.keys() - {"process_group"})
# Settings of a process that are not arguments.
SETTINGS: dict[str, Any] = {"autocast": lambda: torch.autocast("cpu", torch.bfloat16), "grad mode": torch.no_grad}


def draw(rng: random.Random, compiled: random.Random, device: str) -> Call:
    call = arguments.draw_head(rng, rng, device)
    processes = rng.randint(1, min(most_processes(), MOST))
    in_sequence = rng.random() < 0.3
    length = processes * rng.randint(1, 4) if in_sequence else rng.randint(1, 12)
    return {
        **call,
        "dtype": rng.choice(["float64", "float64", "float32"]),
        "backend": "torch" if device == "cpu" else "triton",
        "vocab": rng.choice([1, 2, 3, 7, 40, 41, 200]),
        "ignore_index": rng.choice([-100, 0, 300]),
        "leading": (rng.randint(1, 3), length),
        "shift": min(call["shift"], length),
        "grads": DEFAULTS["grads"],
        "logits_dtype": None,
        "accum_dtype": None,
        "beyond": None,
        "processes": processes,
        "sequence_parallel": in_sequence,
        "slices": rng.random() < 0.5,
        "budget": rng.choice([None, None, 20_000]),
        "second": rng.random() < 0.3,
        "differs": rng.choice([*ARGUMENTS, *SETTINGS]) if processes > 1 and rng.random() < 0.3 else "",
    }


@functools.cache
def groups() -> dict[int, Any]:
    """Return a group of the first processes for each size. All processes have to call this."""
    return {
        size: dist.new_group(range(size), timeout=timedelta(seconds=60))
        for size in range(1, min(MOST, dist.get_world_size()) + 1)
    }


def refusal(name: str, is_odd: bool, local: split_head.LocalShare, options: flce.ChunkOptions) -> str | None:
    """Check that all processes refuse a call if one of them, which `is_odd`, has another argument or setting."""
    given: dict[str, Any] = {argument: parameter.default for argument, parameter in PARAMETERS.items()}
    given |= {"input": local.input, "linear_weight": local.weight, "target": local.p.target, "linear_bias": local.bias}
    given |= {"adapters": local.adapters, "options": options, **local.kwargs, **local.group_arguments}
    if is_odd and name in given:
        value = given[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        given[name] = value + 1 if is_number else None if isinstance(value, Tensor) or value else "wrong"
    try:
        with (
            SETTINGS[name]() if is_odd and name in SETTINGS else contextlib.nullcontext(),
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setenv("FLCE_DEBUG", "1")  # Without it a GPU's processes compare nothing.
            FUNCTION(**given)
    except ValueError as error:
        return None if "given different arguments" in str(error) else f"{name}: {error}"
    return f"{name}: no error"


def program(call: Call) -> str | None:
    """Run a program in one of the processes. Return a description of a wrong result."""
    size = min(call["processes"], dist.get_world_size())
    group = groups()[size]
    if dist.get_rank() >= size:
        return None
    device = split_head.device().type
    given = {name: call[name] for name in ("strategy", "skip_ignored")}
    if call["budget"] is not None:
        given["max_workspace_bytes"] = call["budget"]
    elif call["strategy"] != "vocab":
        given["chunk_rows"] = call["chunk_rows"]
    calls = [call] + [{**call, "seed": call["seed"] + 1, "reduction": "sum", "num_items": 7}] * call["second"]
    running = []
    for each in calls:
        p = arguments.head_of(each, device)
        spoiled = arguments.leaves_of_call(call, p)
        local = split_head.LocalShare(spoiled, group, call["sequence_parallel"], call["slices"])
        if call["differs"]:
            is_odd = dist.get_rank() == call["seed"] % size
            return refusal(call["differs"], is_odd, local, flce.ChunkOptions(**given))
        try:
            out = local.loss(stats=each["stats"], options=flce.ChunkOptions(**given))
        except ValueError as error:  # in all processes, before a collective
            # Slices of few columns may be equal.
            if "is too small" not in str(error) and "equal shards" not in str(error):
                raise
            return "refused"
        running.append((each, p, local, out))
    errors, what = Errors(), ""
    for each, p, local, out in reversed(running):
        loss, upstream = (out.loss if each["stats"] else out), arguments.upstream_of(each, p)
        loss.backward(upstream.expand_as(loss))
        full = p.map(lambda t, letter: t.detach().requires_grad_(letter == "t"))
        once = arguments.arithmetic(each, p)
        # Each process rounds its part of dX, and the sum over processes is rounded.
        expected = Expected(full, upstream, replace(once, roundings=once.roundings + group.size()))
        of_classes = operator.itemgetter(local.classes)
        named = by_letter(local.input, local.weight, local.bias, local.kwargs.get("token_weight"), local.adapters)
        grads = {name: None if t is None else t.grad for name, t in named.items()}
        shares = {name: of_classes if name[0] in "wbB" else local.tokens for name in named if name != "t"}
        try:
            expected.compare_losses(errors, "divided", loss.detach(), out, each["stats"])
            expected.compare_gradients(errors, "divided", grads, shares=shares)
        except Mismatch as failure:
            what = f"{failure.what}: {failure}"
    return what or None


def check(call: Call, device: str, errors: Errors) -> None:
    if call["shift"] > call["leading"][-1] or (call["sequence_parallel"] and call["leading"][-1] % call["processes"]):
        return  # of shrinking
    for rank, text in enumerate(world(min(most_processes(), MOST)).run(program, call)):
        if text == "refused":
            raise Refused
        if text is not None:
            raise Mismatch(text.partition(":")[0], f"rank {rank}: {text.partition(': ')[2]}")


KIND = Kind("divided", DEFAULTS, draw, check, share=0.5)
