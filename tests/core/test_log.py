"""The logger ``flce``: it logs each new shape once, and nothing by default. Warnings name the line of user code."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flce
from flce.core import log
from flce.engine import passes
from flce.ops import linear_cross_entropy
from flce.testing.problem import make_problem
from tests.processes import run_python

_sizes = itertools.count(1201)  # plans are logged once in a process: each test needs other shapes


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """Return the messages since the last call."""

    def new() -> list[str]:
        lines = [record.getMessage() for record in caplog.records if record.name == "flce"]
        caplog.clear()
        return lines

    with caplog.at_level(logging.DEBUG, logger="flce"):
        yield new


def call(tokens: int, classes: int, **kwargs: Any) -> Tensor:
    x, w = torch.randn(tokens, 8, requires_grad=True), torch.randn(classes, 8)
    loss = flce.fused_linear_cross_entropy(x, w, torch.zeros(tokens, dtype=torch.long), **kwargs)
    assert isinstance(loss, Tensor)
    loss.sum().backward()
    return loss


def test_each_shape_once(logged: Any, torch_backend: str) -> None:
    """A message has the shape, backend, plan, requested results, and reason for logits in memory."""
    classes = next(_sizes)
    for _ in range(3):
        call(5, classes)
    (line,) = logged()
    for part in (f"N=5, H=8, V={classes} in float32 on cpu (torch backend)", "strategy 'tokens'", "workspace"):
        assert part in line
    assert "reduction='mean', gradients of input;" in line
    assert "logits in memory: no kernel" in line
    for tokens in (6, 5, 6):
        call(tokens, classes)
    (other,) = logged()
    assert f"N=6, H=8, V={classes}" in other
    call(5, classes, label_smoothing=0.1, reduction="none")
    (other,) = logged()
    assert "reduction='none', label_smoothing=0.1, gradients" in other


def test_copies_of_logits(logged: Any, torch_backend: str) -> None:
    logits, target = torch.randn(2, 4, 9), torch.zeros(2, 4, dtype=torch.long)
    flce.cross_entropy(logits, target)
    assert not logged()
    flce.cross_entropy(logits[:, :-1], target[:, :-1])
    assert logged() == ["logits of shape (2, 3, 9) are copied, strides (36, 9, 1)"]


class _Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_tracing_logs_nothing(logged: Any, torch_backend: str) -> None:
    """A call in a graph is logged when the graph runs, once."""
    classes, while_traced = next(_sizes), []

    def backend(graph: Any, inputs: Any) -> Any:
        while_traced.extend(logged())
        return graph.forward

    def loss(x: Tensor, w: Tensor, y: Tensor) -> Any:
        return flce.fused_linear_cross_entropy(x, w, y)

    compiled = torch.compile(loss, backend=backend, fullgraph=True)
    x, w = torch.randn(5, 8, requires_grad=True), torch.randn(classes, 8)
    for _ in range(2):
        compiled(x, w, torch.zeros(5, dtype=torch.long)).backward()
    torch.compiler.reset()
    assert not while_traced
    (line,) = logged()
    assert f"N=5, H=8, V={classes}" in line


def test_off_by_default(torch_backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a handler no message is formatted."""
    monkeypatch.setattr(linear_cross_entropy, "log_new_shape", lambda *args: pytest.fail("logged"))
    call(5, next(_sizes))
    with _Nothing():
        call(5, next(_sizes))


# ---------------------------------------------------------------------------------------------- the environment

CALLS = """
import torch
import flce
from flce.core import log
x, w, y = torch.randn(9, 8, requires_grad=True), torch.randn(30, 8), torch.zeros(9, dtype=torch.long)
for _ in range(2):
    flce.fused_linear_cross_entropy(x, w, y).backward()
"""


def stderr(code: str, **env: str) -> list[str]:
    done = run_python("-c", code, env=env)
    assert not done.stdout
    return done.stderr.splitlines()


def test_the_environment() -> None:
    """A message is printed once, also if the application has a handler."""
    (logged,) = stderr("import logging; logging.basicConfig()" + CALLS, FLCE_LOG="debug")
    assert logged.startswith("flce DEBUG new shape: N=9, H=8, V=30")


LEVELS = [("debug", logging.DEBUG), ("DEBUG", logging.DEBUG), ("info", logging.INFO), ("", logging.NOTSET)]


@pytest.mark.parametrize("name, level", LEVELS)
def test_levels_of_the_environment(name: str, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.Logger("made up")
    monkeypatch.setattr(log, "logger", logger)
    monkeypatch.setenv("FLCE_LOG", name)
    log.configure_from_environment()
    assert (logger.level, len(logger.handlers), logger.propagate) == (level, 1 if name else 0, not name)


def test_a_wrong_level() -> None:
    """The import succeeds, with one warning at the line that imports flce."""
    warned, *rest = stderr(CALLS, FLCE_LOG="loud")
    assert warned.startswith("<string>:3: RuntimeWarning: FLCE_LOG must be one of debug, info")
    assert "'loud'" in warned
    assert all(line.strip() == "import flce" for line in rest)


# ---------------------------------------------------------------------------------------------------- warnings


def without_memory(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make the allocations of the default plan of a pass fail."""
    original = getattr(passes, name)

    def run(problem: Any, plan: Any, *args: Any, **kwargs: Any) -> Any:
        if plan.case.options.max_workspace_bytes is None:
            raise torch.OutOfMemoryError("for this test")
        return original(problem, plan, *args, **kwargs)

    monkeypatch.setattr(passes, name, run)


@pytest.mark.parametrize("name, reduction", [("forward", "mean"), ("backward", "none")])
def test_a_lack_of_memory_warns_once_a_line(
    name: str, reduction: str, torch_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warning names the line of user code that called flce or backward. Another line warns again."""
    without_memory(monkeypatch, name)
    p = make_problem((400,), 16, 500, dtype=torch.float32, reduction=reduction)

    def step() -> Tensor:
        x = p.input.clone().requires_grad_()
        loss = flce.fused_linear_cross_entropy(x, p.linear_weight, p.target, reduction=reduction)
        assert isinstance(loss, Tensor)
        return loss.sum()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            step().backward()
            with warnings.catch_warnings():  # resets Python's record of shown warnings
                pass
        step().backward()
    of_it = [w for w in caught if "flce could not allocate" in str(w.message)]
    assert {w.filename for w in of_it} == {__file__}
    assert len(of_it) == (1 if name == "forward" else 2)  # `step` calls forward in one line
    assert len({w.lineno for w in of_it}) == len(of_it)
