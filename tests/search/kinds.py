"""The kinds of calls that the search draws. A new kind is a module with a `KIND`, and its name in `MODULES`."""

from __future__ import annotations

import importlib
import os

import pytest
import torch

from tests.search.driver import Kind

MODULES = {
    "operator": "tests.search.linear_loss",
    "logits": "tests.search.logits",
    "softmax": "tests.search.softmax",
    "logprobs": "tests.search.logprobs",
    "divergence": "tests.search.divergence",
    "lazy": "tests.search.lazy",
    "divided": "tests.search.divided",
}
# Programs whose tensors are in CPU memory.
ONLY_ON_CPU = ("lazy",)


def load(*names: str) -> dict[str, Kind]:
    """Import the modules of these kinds, by default of all."""
    return {name: importlib.import_module(MODULES[name]).KIND for name in names or MODULES}


def prepare(device: str) -> None:
    """Set up a process of the command: one thread, and Triton's interpreter for tensors of a CPU."""
    torch.set_num_threads(1)
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        from tests import interpreted_bfloat16, interpreted_masks, quick_interpreter

        interpreted_masks.fix_interpreter()
        quick_interpreter.speed_up_interpreter()
        interpreted_bfloat16.fix_interpreter(pytest.MonkeyPatch())
