"""Fixtures, markers and the settings that have to be made before Triton is imported."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator

import pytest
import torch

from tests import interpreted_masks, quick_interpreter

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    # Triton reads this when a kernel is defined: the kernels then run in the interpreter, on CPU tensors.
    os.environ["TRITON_INTERPRET"] = "1"
    interpreted_masks.fix_interpreter()
    # Threads that wait for one another are what takes the time where several processes share few cores.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, min(4, (os.cpu_count() or 1) // workers)))
    with contextlib.suppress(ImportError):  # of Triton
        quick_interpreter.speed_up_interpreter()

try:
    from hypothesis import HealthCheck, settings

    _common = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
    settings.register_profile("default", derandomize=True, max_examples=20, **_common)  # type: ignore[arg-type]
    settings.register_profile("search", max_examples=1000, **_common)  # type: ignore[arg-type]
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
except ImportError:  # the tests that need hypothesis skip themselves
    pass


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped where there is none")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if HAS_CUDA:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def no_launches_of_other_tests() -> None:
    """Some change what launches are made of."""
    replay = sys.modules.get("flce.backends.triton.replay")
    if replay is not None:
        replay.clear()


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs the test once with each backend."""
    if request.param == "triton":
        pytest.importorskip("triton")
        if HAS_CUDA and "device" not in request.fixturenames:
            pytest.skip("a test on CPU tensors: Triton takes them under the interpreter only")
    monkeypatch.setenv("FLCE_BACKEND", request.param)
    return str(request.param)


@pytest.fixture
def torch_backend(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FLCE_BACKEND", "torch")
    return "torch"


@pytest.fixture
def triton_backend(monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("triton")
    monkeypatch.setenv("FLCE_BACKEND", "triton")
    return "triton"


@pytest.fixture
def device() -> torch.device:
    """CUDA where there is one: the same tests then check the compiled kernels."""
    return torch.device("cuda" if HAS_CUDA else "cpu")


@pytest.fixture
def _no_compiled_code() -> Iterator[None]:
    """What other tests have compiled is not there, and what this one compiles goes."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True, scope="module")
def _steady_heap() -> None:
    """The libraries are not looked through again in every collection, of which trainers and benchmarks ask for many."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fresh_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test starts from the same generator state and without debug switches."""
    monkeypatch.delenv("FLCE_DEBUG", raising=False)
    torch.manual_seed(0)
