"""Kernels compiled for GPUs that this machine does not have fit in registers and shared memory; choice of a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flce import backends
from flce.backends.contract import RowInputs, RowOutputs, StatisticsCall, TileClasses
from flce.core.devices import KNOWN_KINDS
from flce.core.problem import LossSpec

pytest.importorskip("triton")

from flce.backends.triton import launch
from flce.backends.triton.cross_entropy import cross_entropy_kernel
from tests.processes import run_python

CUDA = torch.device("cuda", 0)
TILE = TileClasses(0, 8, 8, 8)


def test_kernels_fit() -> None:
    """Compile a sample of `scripts/gpu_targets.sh`, for the smallest shared memory, Hopper, the newest GPU, and AMD."""
    names = ["T4", "H200", "B200", "MI300X"]
    done = run_python("-m", "tests.targets", "--sample", *names)  # without the interpreter, which compiles nothing
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == names


# ---------------------------------------------------------------------------------------------------------
# Choice of the backend and number of threads


@pytest.fixture
def has(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Return a function that sets the architecture of the machine's GPU."""

    def set_arch(name: str) -> None:
        monkeypatch.setattr(backends, "device_record", lambda device: KNOWN_KINDS["H200"]._replace(arch=name))
        backends._choose.cache_clear()

    monkeypatch.delenv("FLCE_BACKEND", raising=False)
    yield set_arch
    backends._choose.cache_clear()


def test_amd_uses_triton_on_request(has: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    has("gfx942")
    assert not backends.device_has_fused_products("triton", KNOWN_KINDS["MI300X"])
    assert (
        "have not been run on an AMD GPU; to run them, set FLCE_BACKEND=triton" in backends.choose_backend(CUDA).reason
    )
    for record in (None, KNOWN_KINDS["MI300X"]):
        monkeypatch.delenv("FLCE_BACKEND", raising=False)
        assert backends.choose_backend(CUDA, record).name == "torch"
        monkeypatch.setenv("FLCE_BACKEND", "triton")
        assert backends.choose_backend(CUDA, record).name == "triton"


def test_amd_without_triton(has: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    has("gfx942")
    monkeypatch.setattr(backends, "_has_triton", lambda: False)
    monkeypatch.setenv("FLCE_BACKEND", "triton")
    with pytest.raises(ValueError, match="needs the triton package and a GPU of AMD, or of NVIDIA from"):
        backends.choose_backend(CUDA)


def test_a_device_that_is_too_old(has: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are compiled for compute capability 7.5 and newer, see `tests/targets.py`."""
    has("sm_61")
    assert backends.choose_backend(CUDA).name == "torch"
    reason = "the kernels are for compute capability 7.5 or newer, and the GPU has 6.1"
    assert backends.choose_backend(CUDA).reason == reason
    monkeypatch.setenv("FLCE_BACKEND", "triton")
    with pytest.raises(ValueError, match=r"compute capability 7.5 or newer, and the GPU has 6\.1"):
        backends.choose_backend(CUDA)
    has("sm_75")
    assert backends.choose_backend(CUDA).name == "triton"


def test_threads_in_warps_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of threads is the same, at least one warp. AMD's compiler has no limit of registers; RDNA has warps of
    32."""
    current = SimpleNamespace()
    monkeypatch.setattr(launch, "device_record", lambda device: current.record)
    current.record = KNOWN_KINDS["RTX-3090"]
    assert launch.thread_options(CUDA, 8, 64) == {"num_warps": 8, "maxnreg": 64}
    assert launch.overlap_options(CUDA) == {"OVERLAP": False}
    current.record = KNOWN_KINDS["MI300X"]
    assert launch.thread_options(CUDA, 8, 64) == {"num_warps": 4}
    assert launch.thread_options(CUDA, 1) == {"num_warps": 1}
    assert launch.overlap_options(CUDA) == {"OVERLAP": False}
    current.record = KNOWN_KINDS["MI300X"]._replace(arch="gfx1100")
    assert launch.thread_options(CUDA, 8, 64) == {"num_warps": 8}


@pytest.mark.parametrize(
    "removed, leaves_out, error",
    [
        ((), (), None),
        (("z_loss", "HAS_Z_LOSS"), (), "no parameter for z_loss"),
        (("z_loss", "HAS_Z_LOSS"), ("z_loss",), None),
        (("scale",), (), "no parameter for logit_scale, temperature"),
        (("entropy_ptr",), (), "no parameter for entropy"),
        (("state_ptr",), (), "no parameter for state"),
    ],
)
def test_launches_refuse_what_a_kernel_would_ignore(
    removed: tuple[str, ...], leaves_out: tuple[str, ...], error: str | None
) -> None:
    """An option, a result or an argument without a parameter is an error, unless the launch leaves the option out."""
    names = [name for name in cross_entropy_kernel.arg_names if name not in (*removed, "softcap", "HAS_SOFTCAP")]
    kernel = type("Kernel", (), {"arg_names": names, "__name__": "kernel"})()
    spec = LossSpec(z_loss=0.1, logit_scale=2.0, temperature=3.0, reduction="sum", stats=("entropy",))
    out = RowOutputs.allocate(spec, torch.float32, (4,), lambda shape, dtype: torch.empty(shape, dtype=dtype))
    call = StatisticsCall(RowInputs(torch.zeros(4, dtype=torch.int64), None, None, None, None), spec, TILE, out)
    expected: Any = nullcontext() if error is None else pytest.raises((TypeError, NotImplementedError), match=error)
    with expected:
        launch.build_launch(kernel, (1,), call, {}, leaves_out, state=None)
