"""The search's kind `lazy`: it finds errors, and draws all lines. test_search.py runs programs of fixed seeds."""

from __future__ import annotations

import random
import re

import pytest

from tests.huggingface.fuzz import Run
from tests.huggingface.operations import OPERATIONS
from tests.search import lazy
from tests.search.driver import Call, Errors

pytestmark = pytest.mark.filterwarnings("ignore")


def draw(seed: int) -> Call:
    rng = random.Random(seed)
    return lazy.KIND.draw(rng, rng, "cpu")


# Replacements of one line in the patched model's run, with the kind of difference that each must cause.
WRONG = {
    "values": (".tanh()", ".sin()", "value"),
    "gradients": ("Doubled.apply(", "2 * (", "gradient"),
    "shapes": (".unsqueeze(", ".squeeze(", "shape"),
    "reads": (".isnan().any().item()", ".isfinite().any().item()", "note"),
    "losses": ("label_smoothing=0.1", "label_smoothing=0.11", "value"),
    "errors": (".log_softmax(-1)", ".log_softmax(-9)", "patched raises"),
}


@pytest.mark.parametrize("name", WRONG)
def test_finds_what_is_wrong(name: str) -> None:
    """The search finds a wrong operation of the patched model, and shrinks the program to a few lines."""
    right, wrong, kind = WRONG[name]

    class Other(Run):
        def step(self, code: str) -> None:
            super().step(code.replace(right, wrong) if self.patched else code)

    for seed in range(2000):
        call = draw(seed)
        if not any(right in step for step in call["steps"]) or lazy.KIND.run(call, "cpu", Errors()) is not None:
            continue
        changed = lazy.kind(Other)
        failure = changed.run(call, "cpu", Errors())
        if failure is not None and failure.what == kind:
            call, failure = changed.shrink(call, failure, "cpu")
            assert len(call["steps"]) <= 2, call
            assert right in changed.line(call)
            return
    pytest.fail("it was not found")


def test_programs_are_the_same_in_every_run() -> None:
    assert [draw(seed) for seed in range(20)] == [draw(seed) for seed in range(20)]


def test_all_groups_are_drawn() -> None:
    """All groups and all placeholders are drawn. test_operations.py runs each line."""
    steps = {re.sub(r"^with .*?: ", "", step) for seed in range(300) for step in draw(seed)["steps"]}
    drawn = [
        each
        for each in OPERATIONS
        if any(map(re.compile(re.sub(r"\\\{\w+\\\}", r"[^=]+?", re.escape(each.code))).fullmatch, steps))
    ]
    assert {each.group for each in drawn} == lazy.WEIGHTS.keys()
    assert {name for each in drawn for name in re.findall(r"{(\w+)}", each.code)} == lazy.DRAW_BY_KEY.keys()
