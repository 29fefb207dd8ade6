"""Replayed launches: their signatures, and the addresses that are inserted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import flce
from flce.core import private
from flce.engine.case import Case
from flce.engine.schedules.schedule import Schedule, Statistics
from flce.planning.search import SCHEDULES
from tests.forced import borrowed, force, unnormalized
from tests.helpers import allpairs, row_id
from tests.hopper import plan_as_on_hopper

pytest.importorskip("triton")

from triton.tools.tensor_descriptor import TensorDescriptor

from flce.backends.triton import replay
from flce.backends.triton.launch import Launch


class Kernel:
    """A replacement of Triton's kernels, compiled or not, that records the arguments of its launches."""

    arg_names = ("x", "y", "size", "FLAG")

    def __init__(self) -> None:
        self.built: list[dict[str, Any]] = []
        self.started: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def start(*args: Any, **named: Any) -> Kernel:
            if args:
                assert (grid, named) == ((3, 1, 1), {"stream": 7})
                self.started.append(args)
            else:
                assert grid == (3,)
                self.built.append(named)
            return self

        return start


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    """Replay launches on CPU tensors as if they were on a GPU."""
    streams = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda index: 7))
    monkeypatch.setattr(private, "triton_driver", streams)
    monkeypatch.setattr(replay, "_can_replay", lambda device: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    yield Kernel()
    replay.clear()


def aligned(*shape: int, offset: int = 0) -> Tensor:
    """Return a tensor `offset` elements behind an address that is divisible by 64 bytes."""
    size = torch.Size(shape).numel()
    memory = torch.zeros(size + 64)
    start = -(memory.data_ptr() // 4) % 16 + offset
    return memory[start : start + size].view(shape)


def test_addresses_of_later_calls(kernel: Kernel) -> None:
    """Addresses of arguments, of views of arguments, and of descriptors of both."""

    def list_launches(x: Tensor, parts: list[Tensor], size: int) -> Iterator[Launch]:
        descriptor = TensorDescriptor.from_tensor(parts[0][4:], [4, 4])
        yield Launch(kernel, (3,), {"x": x[8:], "y": descriptor, "size": size}, {"FLAG": True, "num_warps": 4})
        yield Launch(kernel, (3,), {"x": parts[0], "y": x, "size": size}, {"FLAG": False})

    calls = [(aligned(32), [aligned(8, 4)], 5) for _ in range(replay.MAX_DESCRIPTORS + 3)]
    calls.insert(3, calls[1])  # the addresses of an earlier call
    for call in calls:
        replay.run(list_launches, *call)
    assert len(kernel.built) == 2  # in the first call
    assert len(kernel.started) == 2 * len(calls[1:])
    for number, (x, (part,), _) in enumerate(calls[1:]):
        first, second = kernel.started[2 * number : 2 * number + 2]
        assert first[0] == x.data_ptr() + 32
        assert first[2:] == (5, True)
        descriptor = TensorDescriptor.from_tensor(part[4:], [4, 4])
        assert first[1].base.data_ptr() == descriptor.base.data_ptr()
        assert {**vars(first[1]), "base": None} == {**vars(descriptor), "base": None}
        assert second == (part.data_ptr(), x.data_ptr(), 5, False)


def test_different_signatures(kernel: Kernel) -> None:
    """Signatures depend on shapes, strides, dtypes, alignment, numbers, and on tensors that share an address."""

    def list_launches(x: Tensor, y: Tensor | None, size: int) -> Iterator[Launch]:
        yield Launch(kernel, (3,), {"x": x, "y": x if y is None else y, "size": size}, {"FLAG": y is None})

    x, other = aligned(8, 4), aligned(8, 4)
    different = [
        (x, other, 1),
        (x, other, 2),
        (x, None, 1),
        (x, x, 1),
        (x[:4], other, 1),
        (x[:4], other[:4], 1),
        (x[::2], other[:4], 1),
        (x.int(), other, 1),
        (aligned(8, 4, offset=1), other, 1),
        (x, aligned(8, 4, offset=2), 1),
    ]
    for call in different * 2:
        replay.run(list_launches, *call)
    assert len(kernel.built) == len(kernel.started) == len(different)
    again = aligned(8, 4)
    replay.run(list_launches, again, again.view(8, 4), 1)  # two tensors with one address
    assert kernel.started[-1] == (again.data_ptr(), again.data_ptr(), 1, False)
    assert len(kernel.built) == len(different)


def test_launches_that_cannot_be_replayed(kernel: Kernel) -> None:
    """A copy that is allocated with the launch; a view of memory that two arguments share; a kernel that is not
    compiled. Each call builds these launches again."""

    def copied(x: Tensor, y: Tensor) -> Iterator[Launch]:
        yield Launch(kernel, (3,), {"x": x.clone(), "y": y, "size": 1}, {"FLAG": True})

    def shared(x: Tensor, y: Tensor) -> Iterator[Launch]:
        yield Launch(kernel, (3,), {"x": x[16:], "y": y, "size": 1}, {"FLAG": True})

    def interpreted(x: Tensor, y: Tensor) -> Iterator[Launch]:
        yield Launch(Interpreted(), (3,), {"x": x, "y": y, "size": 1}, {"FLAG": True})

    class Interpreted(Kernel):
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
            start = kernel[grid]
            return lambda **named: start(**named) and None

    memory = aligned(32)
    for list_launches in (copied, shared, interpreted):
        for _ in range(2):
            replay.run(list_launches, memory, memory[8:])
    assert len(kernel.built) == 6
    assert not kernel.started


def test_nothing_is_kept_alive(kernel: Kernel) -> None:
    import weakref

    def list_launches(x: Tensor) -> Iterator[Launch]:
        descriptor = TensorDescriptor.from_tensor(x, [4, 4])
        yield Launch(kernel, (3,), {"x": x, "y": descriptor, "size": 1}, {"FLAG": True})

    x = aligned(8, 4)
    reference = weakref.ref(x)
    replay.run(list_launches, x)
    kernel.built.clear()
    del x
    assert reference() is None


def test_signatures_do_not_pile_up(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    def list_launches(x: Tensor, size: int) -> Iterator[Launch]:
        yield Launch(kernel, (3,), {"x": x, "y": x, "size": size}, {"FLAG": True})

    monkeypatch.setattr(replay, "MAX_SIGNATURES", 10)
    for size in range(35):
        replay.run(list_launches, aligned(4), size)
        assert len(replay._prepared) <= 10


# ---------------------------------------------------------------------------------------------------------
# Launches of a call


# For each schedule: requested gradients, the position of the size among the possible sizes, and the launches of forward
# and backward. There is one chunk unless a comment has another number.
LAUNCHES: dict[str, tuple[str, float, int]] = {
    "Statistics": ("", 1.0, 2),
    "Statistics, in registers": ("", 1.0, 3),
    "Chunks": ("xw", 1.0, 4),  # loss scales; losses and gradient of the logits; sum; both gradients times upstream
    "Unnormalized": ("xw", 1.0, 13),
    "Borrowed": ("xw", 1.0, 16),  # two tiles
    "Recomputed": ("xw", 0.5, 20),  # two chunks
    "Sampled": ("xw", 1.0, 15),
    "DeferredChunks": ("xw", 1.0, 5),
    "Blocks": ("xw", 0.5, 7),  # two blocks
    "BlocksAroundSum": ("xw", 0.5, 9),  # three blocks
    "ChunksOfBlocks": ("x", 0.5, 40),  # two chunks of 16 blocks
    "SeparatePasses": ("xw", 0.5, 43),  # two chunks of 16 blocks, then two blocks
}


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from plan_as_on_hopper(monkeypatch)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Return the growing list of the launches that are built."""
    found: list[Launch] = []

    def record(launch: Launch) -> Any:
        found.append(launch)
        return launch.kernel[launch.grid](**launch.args, **launch.options)

    monkeypatch.setattr(Launch, "run", record)
    return found


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_of_a_call(
    name: str, hopper: None, device: torch.device, launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of launches does not grow unnoticed."""
    grads, share, most = LAUNCHES[name]
    # In float32 logits are in memory, in bfloat16 they stay in registers.
    dtype = torch.float32 if name == "Statistics" else torch.bfloat16
    monkeypatch.setenv("FLCE_BACKEND", "triton")
    monkeypatch.setattr("flce.engine.borrowing.BLOCK_MULTIPLE", 64)
    x, w = (torch.randn(n, 64, device=device, dtype=dtype) for n in (40, 2048))
    x.requires_grad_("x" in grads)
    w.requires_grad_("w" in grads)
    y = torch.randint(0, 2048, (40,), device=device)
    kinds = {kind.__name__: kind for kind in SCHEDULES}

    def schedule(c: Case) -> Schedule:
        if name.startswith("Statistics"):
            return Statistics(40, 2048)
        sizes = kinds[name].sizes(c)
        chosen = kinds[name].from_size(c, sizes[int(share * (len(sizes) - 1))])
        assert type(chosen) is kinds[name]
        return chosen

    force(monkeypatch, schedule)
    reduction = "none" if name == "DeferredChunks" else "mean"
    options = flce.ChunkOptions(skip_ignored=False, sample_below=2.0**-12 if name == "Sampled" else None)
    loss: Any = flce.fused_linear_cross_entropy(x, w, y, reduction=reduction, options=options)
    if grads:
        loss.sum().backward()
    launched = [launch.kernel.__name__ for launch in launches]
    assert len(launched) <= most, launched
    if "reference_kernel" in launched:  # loss scales are computed behind the first product: an idle GPU starts earlier
        assert launched.index("product_kernel") < launched.index("reduction_kernel")


def test_every_schedule_has_a_number() -> None:
    assert {kind.__name__ for kind in SCHEDULES} <= set(LAUNCHES)


def specialization(launch: Launch) -> tuple[Any, ...]:
    """Return what Triton compiles a kernel for: compile-time parameters, dtypes, aligned addresses, and numbers that
    are 1 or divisible by 16. A kernel excludes some addresses and numbers."""
    kernel = getattr(launch.kernel, "kwargs", None) or vars(launch.kernel)  # of the interpreter; of a compiled kernel
    fixed = kernel.get("do_not_specialize") or ()
    unaligned = {*fixed, *(kernel.get("do_not_specialize_on_alignment") or ())}
    key: list[Any] = [launch.kernel.__name__, *sorted(launch.options.items())]
    for name, value in launch.args.items():
        if isinstance(value, Tensor):
            key.append((name, value.dtype, name in unaligned or value.data_ptr() % 16 == 0))
        elif value is None:
            key.append((name, None))
        elif isinstance(value, int) and name not in fixed:
            key.append((name, value == 1, value % 16 == 0))
    return tuple(key)


@pytest.mark.parametrize(
    "few_logits, settings",
    [(0, {}), (0, {"options": flce.ChunkOptions(strategy="vocab")}), (1 << 30, {})],
    ids=["exponentials", "blocks", "one pass"],
)
def test_calls_of_other_lengths_compile_no_kernels(
    few_logits: int,
    settings: dict[str, Any],
    hopper: None,
    device: torch.device,
    launches: list[Launch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lengths that are not divisible by 4 give the rows of float32 matrices addresses that are not divisible by 16."""
    monkeypatch.setenv("FLCE_BACKEND", "triton")
    monkeypatch.setattr("flce.engine.case.FEW_LOGITS_BYTES", few_logits)
    monkeypatch.setattr("flce.engine.borrowing.BLOCK_MULTIPLE", 64)
    w = torch.randn(640, 64, device=device, dtype=torch.bfloat16, requires_grad=True)

    def compiled(*lengths: int) -> set[tuple[Any, ...]]:
        launches.clear()
        for tokens in lengths:
            x = torch.randn(tokens, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
            y = torch.randint(0, 640, (tokens,), device=device)
            flce.fused_linear_cross_entropy(x, w, y, **settings).backward()
        return {specialization(launch) for launch in launches}

    assert compiled(64, 128) >= compiled(127, 1)


@pytest.mark.parametrize("cols", [64, 640, 20000])
def test_softmaxes_of_other_lengths_compile_no_kernels(
    cols: int, device: torch.device, launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLCE_BACKEND", "triton")
    for tokens in (16, 7, 1):
        flce.softmax(torch.randn(tokens, cols, device=device, requires_grad=True), dim=-1).sum().backward()
    assert len(launches) == 6
    assert len({specialization(launch) for launch in launches}) == 2


# ---------------------------------------------------------------------------------------------------------
# On the GPU


CALLS = allpairs(
    {
        "tokens": [1, 64, 200, 513],
        "vocab": [1000, 2048, 40000, 50257],
        "hidden": [64, 768],
        "dtype": [torch.bfloat16, torch.float16, torch.float32],
        "way": ["planned", "unnormalized", "borrowed"],  # borrowed only with many classes
        "grads": ["xw", "x", ""],
        "budget": [None, 8 << 20],
        "options": [{}, {"reduction": "none"}, {"softcap": 30.0, "z_loss": 1e-3}, {"stats": ("entropy", "argmax")}],
        "offset": [0, 1, 8],
        "skip_ignored": [False, True],
    }
)


@pytest.mark.gpu
@pytest.mark.parametrize("row", CALLS, ids=row_id)
def test_kept_launches_on_cuda(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that store launches and calls that replay them at other addresses have the same results to the bit."""
    r = SimpleNamespace(**row)
    if r.way != "planned" and r.options.get("reduction") != "none":
        force(monkeypatch, borrowed(1) if r.way == "borrowed" and r.vocab >= 40000 else unnormalized)
    for seed in range(2):
        replay.clear()
        first = call(r, seed)
        between = torch.empty(1000 * (seed + 1), device="cuda")
        again = call(r, seed)
        del between
        for mine, other in zip(again, first, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)
    assert replay._prepared


def call(r: SimpleNamespace, seed: int) -> list[Tensor]:
    """Return the results and the gradients of a call, with the values of a row of CALLS."""
    g = torch.Generator("cuda").manual_seed(seed)

    def operand(*shape: int, name: str) -> Tensor:
        size = torch.Size(shape).numel()
        memory = torch.randn(size + r.offset, device="cuda", generator=g).mul(0.5).to(r.dtype)
        return memory[r.offset :].view(shape).requires_grad_(name in r.grads)

    x, w = operand(r.tokens, r.hidden, name="x"), operand(r.vocab, r.hidden, name="w")
    y = torch.randint(0, r.vocab, (r.tokens,), device="cuda", generator=g)
    y[1::3] = -100
    chunking = flce.ChunkOptions(skip_ignored=r.skip_ignored, max_workspace_bytes=r.budget)
    result: Any = flce.fused_linear_cross_entropy(x, w, y, options=chunking, **r.options)
    results = [result] if isinstance(result, Tensor) else [t for t in result if t is not None]
    loss = results[0]
    if r.grads:
        loss.backward(torch.rand(loss.shape, device="cuda", generator=g, dtype=loss.dtype))
    return [*(t.detach() for t in results), *(t.grad for t in (x, w) if t.grad is not None)]
