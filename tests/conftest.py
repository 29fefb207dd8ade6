"""Fixtures and markers of all tests, and settings that must precede the import of Triton."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import warnings
from collections.abc import Iterator

import pytest
import torch

from tests import interpreted_masks, quick_interpreter

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    # Triton reads this when a kernel is defined: the kernels then run in the interpreter, on CPU tensors.
    os.environ["TRITON_INTERPRET"] = "1"
    interpreted_masks.fix_interpreter()
    # If several processes share few cores, most of the time is spent by threads that wait for each other.
    if "OMP_NUM_THREADS" not in os.environ:
        workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        torch.set_num_threads(max(1, min(4, (os.cpu_count() or 1) // workers)))
    with contextlib.suppress(ImportError):  # of Triton
        quick_interpreter.speed_up_interpreter()

try:
    from hypothesis import HealthCheck, settings

    _common = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
    settings.register_profile("default", derandomize=True, max_examples=20, **_common)  # type: ignore[arg-type]
    settings.load_profile("default")
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
    """Delete stored launches, because some tests change the inputs of launches."""
    replay = sys.modules.get("flce.backends.triton.replay")
    if replay is not None:
        replay.clear()


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test once with each backend."""
    if request.param == "triton":
        pytest.importorskip("triton")
        if HAS_CUDA and "device" not in request.fixturenames:
            pytest.skip("a test on CPU tensors: Triton runs on them only under the interpreter")
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
    """Return the CUDA device if there is one, so that the tests check compiled kernels, otherwise the CPU."""
    return torch.device("cuda" if HAS_CUDA else "cpu")


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch, triton_backend: str) -> Iterator[None]:
    """Use the plans and fused products of a Hopper GPU, without a GPU in the interpreter."""
    from tests import hopper, interpreted_bfloat16

    if not HAS_CUDA:
        interpreted_bfloat16.fix_interpreter(monkeypatch)
    yield from hopper.plan_as_on_hopper(monkeypatch)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Delete compiled code before and after the test."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def fail_on_materialize() -> Iterator[None]:
    """Fail the test if lazy logits are computed without a call of `materialize()`."""
    from flce.huggingface import MaterializedLogitsWarning

    with warnings.catch_warnings():
        warnings.simplefilter("error", MaterializedLogitsWarning)
        yield


@pytest.fixture(autouse=True, scope="module")
def _steady_heap() -> Iterator[None]:
    """Exclude the libraries from garbage collections, because trainers and benchmarks run many collections.

    After the module, end the processes of its tests: threads of their groups of gloo wake up 100 times a second.
    """
    gc.collect()
    gc.freeze()
    yield
    if processes := sys.modules.get("tests.processes"):
        for world in list(processes.World.running):
            world.close()


@pytest.fixture(autouse=True)
def _no_cached_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Return the memory of a large test to the device, which several processes share."""
    yield
    if HAS_CUDA and request.node.get_closest_marker("gpu") and torch.cuda.memory_reserved() > 1 << 30:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _fresh_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset the generator state and the debug switches before each test."""
    monkeypatch.delenv("FLCE_DEBUG", raising=False)
    torch.manual_seed(0)
