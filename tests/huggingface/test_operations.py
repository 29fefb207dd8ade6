"""Each line of `operations.py`: equal results on lazy and real logits; only lines of kind "real" compute all logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flce
from flce.huggingface.lazy import TracedLazyLogits, is_lazy, tables
from tests.huggingface import fuzz
from tests.huggingface.operations import FILLINGS, OPERATIONS

pytestmark = pytest.mark.filterwarnings("ignore")

SETUP = fuzz.Setup(head=(13, 3))
INFERENCE = fuzz.Setup(head=(13, 3), mode="no_grad")
ADAPTED = fuzz.Setup(head=(13, 3), bias=False, adapter=True)
# The table contains some lines twice, so that the fuzzer draws them more often.
LINES = {each.code.format_map(FILLINGS): each for each in OPERATIONS if each.group != "models"}
MAKING = ("views", "copies", "arithmetic")


class PlainRun(fuzz.Run):
    """A run with the plain objects that lazy logits are in a graph of ``torch.compile``."""

    def _forward(self, name: str, ids: torch.Tensor) -> Any:
        logits: Any = super()._forward(name, ids)
        shadow = torch.empty(logits.shape, dtype=logits.dtype, device="meta")
        return TracedLazyLogits._wrap(logits._state, None, shadow)

    def properties(self, name: str, layout: bool) -> dict[str, Any]:
        x = self.tensors[name]
        return {"shape": tuple(x.shape), "dtype": x.dtype, "gradient": x.requires_grad}


STRICT: dict[str, Any] = {"layout": True, "limits": False}


# Operations that have no lazy form if the logits are a sum of two products, as with an adapter.
REAL_WITH_ADAPTER = {
    "{y} = {x}.float() + noise({x}.shape[-1:])",
    "{y} = torch.add({l} / 7.0, noise((13,)).view(1, 1, -1))",
    "{y} = {x} + {o} * 0.7",
    "{loss} = F.cross_entropy(({g} * 0.3 + learned(noise({g}.shape[-1:]))).flatten(0, -2), labels({g}).flatten())",
    "{loss} = F.cross_entropy(({g} + {o} * 0.0).flatten(0, -2), labels({g}).flatten())",
}


def steps_of(*steps: str) -> tuple[str, ...]:
    """Add a line that defines the other operands of the steps."""
    return ("t9 = b(ids)", *steps) if any("t9" in step for step in steps) else steps


def check(setup: fuzz.Setup, *steps: str, how: dict[str, Any] = STRICT) -> None:
    """Assert that the steps have equal values and gradients on both models."""
    names = [name for step in steps for name in fuzz.assigned_names(step)]
    fuzz.compare(setup, steps_of(*steps), tuple(dict.fromkeys(names or ["lg"])), **how)


def becomes(setup: fuzz.Setup, line: str, run_class: type[fuzz.Run] = fuzz.Run) -> str:
    """Return the kind of a line's result on lazy logits: one of the first words in the table."""
    run = run_class(setup, patched=True)
    for step in steps_of(line):
        run.step(step)
    reports = [flce.report(model) for model in run.models.values()]
    if any(report.materialized for report in reports):
        return "real"
    results = [run.tensors[name] for name in fuzz.assigned_names(line) if name in run.tensors]
    if all(map(is_lazy, results)):
        return "lazy"
    return "loss" if any(report.fused for report in reports) else "value"


@pytest.mark.parametrize("line", LINES)
def test_operation(line: str) -> None:
    check(SETUP, line)
    assert becomes(SETUP, line) == LINES[line].becomes


@pytest.mark.parametrize("line", ["t1 = torch.add(lg, other=t2)", "t1 = torch.mul(lg.softmax(-1), other=t2)"])
def test_keywords_with_exchanged_dimensions_of_one_size(line: str) -> None:
    check(fuzz.Setup(shape=(2, 5), head=(5, 3)), "t2 = lg.transpose(1, 2)", line)


@pytest.mark.parametrize("line", [line for line, each in LINES.items() if each.group != "autograd"])
def test_with_an_adapter(line: str) -> None:
    check(ADAPTED, line)
    real = LINES[line].code in REAL_WITH_ADAPTER
    assert becomes(ADAPTED, line) == ("real" if real else LINES[line].becomes)


@pytest.mark.parametrize("line", LINES)
def test_without_gradients(line: str) -> None:
    check(SETUP, f"with torch.no_grad(): {line}")


# Lines that need memory, metadata or autograd, which plain objects do not have.
NOT_PLAIN = ("isinstance", "lg.data", "lg.layout", "lg.nbytes", "hook(", "grad_fn")


@pytest.mark.parametrize(
    "line",
    [line for line, each in LINES.items() if each.group != "autograd" and not any(what in line for what in NOT_PLAIN)],
)
def test_plain_objects(line: str) -> None:
    check(SETUP, line, how={"limits": False, "run": PlainRun})
    assert becomes(SETUP, line, PlainRun) == LINES[line].becomes


def test_plain_objects_have_the_attributes_of_tensors() -> None:
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = PlainRun(SETUP, patched=True).tensors["lg"].no_such_thing
    one_class = PlainRun(SETUP, patched=True).tensors["lg"][..., 0]
    assert TracedLazyLogits._wrap(one_class._state).dim() == one_class.dim() == 2


@pytest.mark.parametrize("line", [line for line, each in LINES.items() if each.group in MAKING and "t1 =" in line])
def test_memory_is_shared_where_it_is_in_stock(line: str) -> None:
    """Reads and writes before and after the operation have the same results."""
    for setup, before, after in (
        (SETUP, "note(lg.isnan().any().item())", "lg.mul_(3.0)"),
        (SETUP, "pass", "note(t1.isnan().any().item())"),
        (SETUP, "pass", "lg.mul_(3.0)"),
        (SETUP, "pass", "t1.mul_(3.0)"),
        (INFERENCE, "pass", "lg.mul_(3.0)"),
        (INFERENCE, "pass", "t1.mul_(3.0)"),
    ):
        check(setup, before, line, after, how={"layout": True})


@pytest.mark.parametrize("before", ["note(lg.isnan().any().item())", "t5 = lg[0]"])
@pytest.mark.parametrize("line", [line for line, each in LINES.items() if each.group == "writes"])
def test_writes_reach_all_views(line: str, before: str) -> None:
    check(SETUP, before, line, "t6 = lg * 2", how={"layout": True})


def test_each_lazy_operation_has_a_reason_and_a_line() -> None:
    """Each lazy operation names the architecture or library that needs it."""
    used: set[int] = set()
    for operation in tables.OPERATIONS.values():
        assert len(operation.used_by) > 2

    class Seen(dict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            found = super().get(key, default)
            used.add(id(found))
            return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "OPERATIONS", Seen(tables.OPERATIONS))
        for line, each in LINES.items():
            if each.becomes != "real":
                becomes(SETUP, line)
    assert [operation.used_by for operation in tables.OPERATIONS.values() if id(operation) not in used] == []
