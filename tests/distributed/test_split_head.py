"""Comparisons of a head that is divided over processes with the float64 oracle.

Without a GPU: four processes, and pairs of them. With one GPU: two processes share it. With more: one process for each.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import os
import random
import signal
import time
from dataclasses import fields, replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

if not dist.is_available():
    pytest.skip("PyTorch without torch.distributed", allow_module_level=True)

import flce
from flce.engine.case import Case
from flce.engine.schedules.schedule import Schedule
from flce.engine.schedules.unnormalized import Borrowed, Recomputed
from flce.testing.problem import Problem, relative_error, run_oracle
from tests.distributed.split_head import (
    LIMIT,
    LocalShare,
    as_on_a_gpu,
    assert_equal_on_all_ranks,
    check,
    device,
    grad_of,
    groups,
    padded,
    problem,
    uneven,
)
from tests.helpers import OTHER_VALUES
from tests.processes import World, in_processes, most_processes, world

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="simulates a GPU")
shared_gpu = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="no collectives of DTensors on a shared GPU")
OPTIONS: list[dict[str, Any]] = [{}, {"strategy": "vocab", "max_workspace_bytes": 16000}, {"chunk_rows": 5}]
OUTPUTS = ("logprob", "entropy", "lse", "argmax", "correct", "mean_logit")


@in_processes(most_processes())
def test_padded_and_empty_slices() -> None:
    """Check shards with some or only padded classes, and empty shards with very low logits in the others."""
    group, low = groups()["all"], -2000.0
    kinds: list[dict[str, Any]] = [
        {"z_loss": 0.1, "class_weight": True},
        {"reduction": "none"},
        {"ignored": 0.3, "adapter_ranks": (2,)},
    ]
    for kwargs, options in itertools.product(kinds, (*OPTIONS, {"sample_below": 2.0**-20})):
        p = problem((3, 4), 16, 41, bias=True, **kwargs)
        assert_equal_on_all_ranks(check(padded(p, 20), group, 1e-9, dict(options)), group)
        vocab = 9 if "sample_below" in options else 3  # a shard of one class has only frequent classes
        p = problem((3, 4), 16, vocab, bias=True, **kwargs)
        p = replace(p, linear_bias=torch.full_like(p.linear_weight[:, 0], low))
        assert_equal_on_all_ranks(check(p, group, 1e-9, dict(options)), group)


DIFFERENTIABLE = ("logprob", "entropy", "lse", "candidate_logprob", "divergence")


def compare_with_one_process(run: Any, *problems: Problem, sequence_parallel: bool) -> None:
    """Compare results and gradients of ``run(*shares, **arguments of the group)`` with the call in one process."""
    group, one = groups()["all"], SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    shares = [LocalShare(p, group, sequence_parallel) for p in problems]
    alone = [LocalShare(p, one) for p in problems]
    outputs = run(*shares, **shares[0].group_arguments), run(*alone)
    for out in outputs:
        values = [x for name in DIFFERENTIABLE if (x := getattr(out, name, None)) is not None]
        slopes = [torch.linspace(0.3, 1.3, x.numel(), dtype=x.dtype, device=x.device).view(x.shape) for x in values]
        torch.stack(
            [(k + 1) * (x * slope).sum() for k, (x, slope) in enumerate(zip(values, slopes, strict=True))]
        ).sum().backward()
    for field in fields(outputs[0]):
        got, expected = (getattr(out, field.name) for out in outputs)
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10, msg=field.name)
    exact = SimpleNamespace(
        grad_input=alone[0].input.grad,
        grad_weight=alone[0].weight.grad,
        grad_bias=None if alone[0].bias is None else alone[0].bias.grad,
        grad_adapters=[(a.grad, b.grad) for a, b in alone[0].adapters],
        grad_token_weight=None,
    )
    assert max(shares[0].errors(exact).values()) < 1e-9


@in_processes(most_processes())
def test_results_of_tokens() -> None:
    draw = torch.Generator().manual_seed(2)
    variants: list[dict[str, Any]] = [
        {},
        {"bias": True, "softcap": 3.0, "logit_scale": -0.5},
        {"adapter_ranks": (3,), "temperatures": True},
        {"ignored": 0.4},
        {"ignored": 1.0},
        {"masked": True},
    ]
    for vocab, variant, sequence_parallel in itertools.product((40, 41, 3), variants, (False, True)):
        numbers: dict[str, Any] = {name: variant[name] for name in ("softcap", "logit_scale") if name in variant}
        if "temperatures" in variant:
            numbers["temperature"] = (torch.rand(3, 8, dtype=torch.float64, generator=draw) + 0.5).to(device())
        if "masked" in variant:
            mask = (torch.rand(3, 8, generator=draw) < 0.3).to(device())
            numbers |= {"mask": mask, "shift": 1, "options": flce.ChunkOptions(skip_ignored=True)}
        numbers["candidates"] = torch.randint(-1, vocab, (3, 8, 4), generator=draw).to(device())

        def run(share: LocalShare, numbers: Any = numbers, **group_arguments: Any) -> flce.LinearLogprobsOutput:
            arguments: dict[str, Any] = {
                "linear_bias": share.bias,
                "adapters": share.adapters,
                "top_k": min(5, share.vocab_size),
            }
            arguments |= {"outputs": OUTPUTS, **numbers, **group_arguments}
            return flce.linear_logprobs(share.input, share.weight, share.p.target, **arguments)

        p = problem(
            (3, 8), 16, vocab, **{k: value for k, value in variant.items() if k not in ("temperatures", "masked")}
        )
        compare_with_one_process(run, p, sequence_parallel=sequence_parallel)


@in_processes(most_processes())
def test_divergences() -> None:
    variants: list[dict[str, Any]] = [{"ignored": 0.4}, {"bias": True, "adapter_ranks": (3,)}]
    kinds = ("forward_kl", "reverse_kl", "jsd")
    for vocab, variant, sequence_parallel, kind in itertools.product((40, 41, 3), variants, (False, True), kinds):

        def run(student: LocalShare, teacher: LocalShare, kind: str = kind, **group_arguments: Any) -> Any:
            return flce.linear_divergence(
                student.input, student.weight, teacher.input, teacher.weight, target=student.p.target,
                kind=kind, student_bias=student.bias, teacher_bias=teacher.bias, student_adapters=student.adapters,
                teacher_adapters=teacher.adapters, student_softcap=4.0, temperature=0.8,
                outputs=("divergence", "logprob", "entropy"), **group_arguments,
            )  # fmt: skip

        teacher = problem((3, 8), 12, vocab, bias=True, adapter_ranks=(2,), seed=5)
        student = problem((3, 8), 16, vocab, **variant)
        compare_with_one_process(run, student, teacher, sequence_parallel=sequence_parallel)


@no_gpu
@in_processes(2)
def test_schedules_of_a_gpu() -> None:
    """Check the schedules and dtypes of a GPU with two processes."""
    group, names = groups()["pair"], set[str]()
    half = (torch.bfloat16, torch.float16)
    variants: dict[str, dict[str, Any]] = {
        "plain": {"ignored": 0.3, "z_loss": 0.01},
        "smoothing": {"label_smoothing": 0.2, "class_weight": True, "z_loss": 0.1, "ignored": 0.3},
        "bias": {"reduction": "sum", "bias": True, "class_weight": True},
        "softcap": {"softcap": 3.0, "logit_scale": 0.5, "temperature": 0.7, "token_weight": True},
    }
    for hopper in (False, True):
        with as_on_a_gpu(hopper) as plans:
            dtypes = itertools.cycle(half[: 2 - hopper])
            for kwargs in variants.values():
                dtype = next(dtypes)
                p = problem((2, 12), 64, 1111 if hopper else 555, dtype=dtype, **kwargs)
                options: dict[str, Any] = {"chunk_rows": 16, "skip_ignored": hopper, "stats": ("lse", "logprob")}
                check(p, group, LIMIT[dtype], options, result_limit=1e-5)
            # A shard with only padded classes, and a shard without classes. With token_weight another kernel runs.
            # A slice of one class has the strides of contiguous rows, a slice of two classes has not.
            columns = LocalShare(problem((6,), 64, 3, dtype=torch.bfloat16), group)
            columns.weight = columns.weight.detach().t().contiguous().t().requires_grad_()
            columns.loss().backward()
            assert plans[-1].case.has_fused_products == hopper
            for weighted in (False, True):
                dtype = next(dtypes)
                options = {"chunk_rows": 4, "skip_ignored": hopper, "stats": ("lse",)}
                kwargs = {"dtype": dtype, "z_loss": 0.01, "token_weight": weighted}
                p = padded(problem((6,), 64, 257, bias=True, **kwargs), 140)
                check(p, group, LIMIT[dtype], dict(options), result_limit=1e-5)
                p = problem((6,), 64, 1, softcap=3.0, **kwargs)
                check(p, group, LIMIT[dtype], dict(options), result_limit=1e-5)
            for reduction in ("mean", "none"):
                p = uneven(problem((10,), 64, 257, dtype=half[0], reduction=reduction))
                check(
                    p, group, LIMIT[half[0]], {"skip_ignored": hopper, "stats": ("lse", "logprob")}, result_limit=1e-5
                )
            if hopper:  # Processes with different numbers of classes, if the host may not read values.
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr("flce.engine.vectors.can_read_values", lambda device: False)
                    p = problem((6,), 64, 128 + group.rank(), dtype=half[0])
                    x, weight = LocalShare.leaf(p.input), LocalShare.leaf(p.linear_weight)
                    for smoothing in (0.0, 0.1):  # with the kernel, and with PyTorch
                        options = {"reduction": "none", "label_smoothing": smoothing}
                        loss = flce.fused_linear_cross_entropy(x, weight, p.target, process_group=group, **options)
                        assert loss.isnan().all()
            names.update(type(plan.schedule).__name__ for plan in plans)
    assert {"Chunks", "Unnormalized"} <= names


@no_gpu
@in_processes(most_processes())
def test_schedules_that_borrow_memory() -> None:
    """Check schedules that compute logits twice or borrow the memory of dW."""

    def choose(kind: Any) -> Any:
        def create(c: Case) -> Schedule:
            sizes = kind.sizes(c)
            return kind.from_size(c, sizes[min(8, len(sizes)) - 1])

        return create

    from tests.forced import force

    for kind in (Borrowed, Recomputed):
        with as_on_a_gpu(True), pytest.MonkeyPatch.context() as patch:
            schedules = force(patch, choose(kind))
            p = problem((24,), 64, 2300, dtype=torch.bfloat16, z_loss=0.01, token_weight=True)
            options = {"skip_ignored": False, "stats": ("lse",)}
            check(p, groups()["pair"], LIMIT[torch.bfloat16], options, result_limit=1e-5)
            assert schedules


@in_processes(most_processes())
def test_compiled() -> None:
    """Check that a call that is compiled as one graph has the bits of an eager call."""
    p = problem((2, 8), 16, 41, class_weight=True, label_smoothing=0.1)
    for sequence_parallel in (False, True):
        local, again = (LocalShare(p, groups()["all"], sequence_parallel, slices=True) for _ in range(2))
        local.loss().backward()
        torch.compile(again.loss, fullgraph=True, backend="aot_eager")().backward()
        for got, expected in ((again.input, local.input), (again.weight, local.weight)):
            assert torch.equal(grad_of(got), grad_of(expected))


@in_processes(most_processes())
def test_wrong_arguments() -> None:
    group, rank = groups()["all"], dist.get_rank()
    p = problem((3, 4), 16, 41)
    local = LocalShare(p, group)
    given: dict[str, Any] = {"input": local.input, "linear_weight": local.weight, "target": p.target}
    # `dist.new_group` returns this value in processes that are not in the group.
    others: Any = dist.GroupMember.NON_GROUP_MEMBER
    scalar = torch.ones((), dtype=torch.float64, device=device())
    both = {"vocab_size": 41, "sequence_parallel": True}
    rows = rf"rank {rank} of .* must have a linear_weight of .* vocab_size=9"
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "^vocab_size=41 needs a process_group: give", {"vocab_size": 41}),
        (ValueError, "^sequence_parallel=True needs a process_group: give", {"sequence_parallel": True}),
        (ValueError, "^vocab_size=41 and sequence_parallel=True need a process_group: give", both),
        (TypeError, "sequence_parallel must be a bool", {**local.group_arguments, "sequence_parallel": 1}),
        (TypeError, "process_group must be a torch.distributed.ProcessGroup, got str", {"process_group": "tp"}),
        (ValueError, rows, {"process_group": group, "vocab_size": 9}),
        (ValueError, "vocab_size must be positive, got 0", {"process_group": group, "vocab_size": 0}),
        (ValueError, "must contain this process", {"process_group": others}),
        (ValueError, r"weight must have shape \(41,\)", {"weight": scalar, **local.group_arguments}),
        (
            ValueError,
            r"adapters\[0\]\[1\] must have shape",
            {"adapters": [(local.input, scalar)], **local.group_arguments},
        ),
    ]
    for kind, message, arguments in cases:
        with pytest.raises(kind, match=message):
            flce.fused_linear_cross_entropy(**{**given, **arguments})
    settings = {"outputs": ("lse",), "process_group": others, "sequence_parallel": True}
    with pytest.raises(ValueError, match="must contain this process"):
        flce.linear_logprobs(local.input, local.weight, None, **settings)
    with pytest.raises(ValueError, match="top_k must be at most the 41 classes of all processes, got 42"):
        flce.linear_logprobs(**given, top_k=42, **local.group_arguments)
    # Collectives do not propagate tangents of forward-mode differentiation.
    shares = LocalShare(problem((3, 4), 16, 41), group, sequence_parallel=True)
    with forward_ad.dual_level():
        shares.input = forward_ad.make_dual(shares.input, torch.ones_like(shares.input))
        with pytest.raises(RuntimeError, match="does not support forward-mode"):
            shares.loss()
    os.environ["FLCE_DEBUG"] = "1"
    # The same shard in all processes, with and without vocab_size.
    equal = "ranks 0 and 1 of the group were given equal shards of linear_weight"
    for function in (flce.fused_linear_cross_entropy, flce.linear_logprobs):
        with pytest.raises(ValueError, match=equal):
            function(local.input, p.linear_weight, p.target, process_group=group)
    settings = {"process_group": group, "vocab_size": 5 * group.size()}
    with pytest.raises(ValueError, match=equal):
        flce.fused_linear_cross_entropy(local.input, p.linear_weight[:5], p.target % 5, **settings)
    for constant in (
        torch.zeros(10, 16),
        torch.linspace(0, 1, 16).expand(10, 16),
    ):  # weights before training, or padding
        weight = constant.to(p.linear_weight)
        loss = flce.fused_linear_cross_entropy(local.input, weight, p.target % 10, process_group=group)
        torch.testing.assert_close(loss, torch.full_like(loss, math.log(10 * group.size())))
    target = p.target.clone()
    target[0, 0] = 41
    with pytest.raises(IndexError, match="expected 0 <= target < 41"):
        flce.fused_linear_cross_entropy(local.input, local.weight, target, **local.group_arguments)


@in_processes(most_processes())
def test_different_calls() -> None:
    """Check that each process raises a ValueError if the last process gives another value of any argument of any
    function, a wrong value, or has another setting."""
    group = groups()["all"]
    is_last, os.environ["FLCE_DEBUG"] = dist.get_rank() == group.size() - 1, "1"
    kwargs = {"bias": True, "adapter_ranks": (2,), "class_weight": True, "token_weight": True, "reduction": "sum"}
    p = problem((3, 2 * group.size()), 16, 41, num_items=7, ignored=0.3, **kwargs)
    own, theirs = LocalShare(p, group), LocalShare(problem((3, 2 * group.size()), 12, 41, bias=True), group)
    ids = torch.arange(5, device=device()).expand(*p.target.shape, 5)
    of_ids = torch.full(ids.shape, -2.0, dtype=torch.float64, device=device())
    head: dict[str, Any] = {"linear_weight": own.weight, "linear_bias": own.bias, "adapters": own.adapters}
    student = {f"student_{name.removeprefix('linear_')}": value for name, value in head.items()}
    teacher = {"teacher": theirs.input, "teacher_weight": theirs.weight, "teacher_bias": theirs.bias}
    top_k = {**student, "student": own.input, "target": p.target, "teacher_topk": (ids, of_ids)}
    temperature = torch.ones(p.target.shape, dtype=torch.float64, device=device())
    calls: list[tuple[Any, dict[str, Any]]] = [
        (flce.fused_linear_cross_entropy, {"input": own.input, "target": p.target, **head, **own.kwargs}),
        (flce.linear_logprobs, {"input": own.input, "target": p.target, **head, "temperature": temperature}),
        (flce.linear_logprobs, {"input": own.input, "target": p.target, **head, "candidates": ids, "top_k": 1}),
        (flce.linear_divergence, {**student, "student": own.input, **teacher, "target": p.target, "kind": "jsd"}),
        (flce.linear_divergence, top_k),
        (
            flce.cross_entropy,
            {"logits": own.weight[:, :1].T.expand(*p.target.shape, -1), "target": p.target, **own.kwargs},
        ),
    ]
    numbers = {**OTHER_VALUES, "ignore_index": 3, "shift": 1, "num_items": 8, "top_k": 2, "beta": 0.1}
    numbers |= {
        f"{model}_{name}": numbers[name] for model in ("student", "teacher") for name in ("softcap", "logit_scale")
    }
    others: dict[str, Any] = {
        **numbers,
        "reduction": "none",
        "stats": ("lse",),
        "outputs": ("entropy",),
        "kind": "reverse_kl",
        "candidates": ids + 1,
        "teacher_topk": (ids + 1, of_ids),
        "options": flce.ChunkOptions(chunk_rows=3),
        "inplace": True,
        "vocab_size": 42,
        "sequence_parallel": True,
    }
    for function, call in calls:
        call |= {k: v for k, v in own.group_arguments.items() if function is not flce.cross_entropy or k[0] != "s"}
        changes: list[tuple[str, Any]] = []
        for name in sorted(inspect.signature(function).parameters.keys() - {"process_group"}):
            value = call.get(name)
            wrong = [None, "wrong", torch.ones(2, 3, device=device(), dtype=torch.complex64)]
            if isinstance(value, Tensor):
                wrong += [value[:2], value.to(torch.float16)]
                wrong += [value.detach()] * value.requires_grad + [value.roll(1)] * (not value.is_floating_point())
            changes += [(name, x) for x in [others.get(name), *wrong] if x is not None or value is not None]
        changes += [("temperature", -temperature), ("target", p.target.double())]
        changes = [(name, x) for name, x in changes if name in inspect.signature(function).parameters]
        for name, other in changes:
            with pytest.raises(ValueError, match="were given different arguments"):
                function(**{**call, name: other} if is_last else call)
        for setting in (torch.no_grad(), torch.autocast(device().type, torch.bfloat16)):
            with (
                pytest.raises(ValueError, match="were given different"),
                setting if is_last else contextlib.nullcontext(),
            ):
                function(**call)
        function(**call)
    with pytest.raises(ValueError, match=r"were given different arguments.*function="):
        calls[0][0](**calls[0][1]) if is_last else calls[1][0](**calls[1][1])


@pytest.mark.gpu
@in_processes(max(1, torch.cuda.device_count() // 2 * 2))
def test_captured() -> None:
    """Check a call in a CUDA graph with NCCL."""
    p = problem((64,), 128, 1000, dtype=torch.bfloat16)
    local, again = (LocalShare(p, dist.group.WORLD) for _ in range(2))
    options = flce.ChunkOptions(skip_ignored=False)
    local.loss(options=options).backward()
    graph = torch.cuda.CUDAGraph()
    again.loss(options=options).backward()
    again.input.grad = again.weight.grad = None
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        again.loss(options=options).backward()
    graph.replay()
    assert torch.equal(grad_of(again.input), grad_of(local.input))
    assert torch.equal(grad_of(again.weight), grad_of(local.weight))


def last_fails(killed: bool) -> tuple[str, float]:
    """End or fail in the last process before the collective. Return the error of this process, and its seconds."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    p = problem((3, 4), 16, 41)
    local, target = LocalShare(p, group), p.target
    local.loss()
    start = time.monotonic()
    try:
        if dist.get_rank() == dist.get_world_size() - 1:
            target = target.float()
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)
        flce.fused_linear_cross_entropy(local.input, local.weight, target, **local.group_arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "none", 0.0


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="NCCL's watchdog ends processes instead of a wait")
@pytest.mark.parametrize("killed", [False, True])
def test_one_process_fails(killed: bool) -> None:
    """Check that the other processes wait no longer than the group's timeout of 2 seconds."""
    with contextlib.closing(World(most_processes())) as own_world:
        results = own_world.run(last_fails, killed, survivors=own_world.size - killed)
    assert all(error != "none" and seconds < 10 for error, seconds in results)
    assert killed or "target must hold class indices" in results[-1][0]


@shared_gpu
@in_processes(most_processes())
def test_gathered_weights() -> None:
    """Check `flce.gathered` with different tokens in each process: gradients of the mean of all losses."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    count, rank = dist.get_world_size(), dist.get_rank()
    p = problem((3, 4), 16, 41)
    inputs = [problem((3, 4), 16, 41, seed=k).input for k in range(count)]
    expected = torch.stack([run_oracle(replace(p, input=x)).grad_weight for x in inputs]).mean(0)
    meshes: list[tuple[Any, list[Any]]] = [(init_device_mesh(device().type, (count,)), [Shard(0)])]
    if count == 4:
        meshes.append((init_device_mesh(device().type, (2, 2)), [Replicate(), Shard(0)]))
    for (mesh, placements), dtype, gather_dtype in itertools.product(
        meshes, (torch.float64, torch.float32), (None, torch.bfloat16)
    ):
        if dtype == torch.float64 and gather_dtype is not None:
            continue
        weight = distribute_tensor(p.linear_weight.to(dtype), mesh, placements).requires_grad_()
        for _ in range(2):  # gradients of several passes add up
            full_weight = flce.gathered(weight, gather_dtype)
            assert type(full_weight) is Tensor
            assert full_weight.dtype == (gather_dtype or dtype)
            loss: Any = flce.fused_linear_cross_entropy(inputs[rank].to(full_weight.dtype), full_weight, p.target)
            loss.backward()
        grad: Any = weight.grad
        assert isinstance(grad, DTensor)
        assert (grad.dtype, grad.placements) == (dtype, tuple(placements))
        limit = 1e-9 if dtype == torch.float64 else 1e-5 if gather_dtype is None else 1e-2
        assert relative_error(grad.full_tensor(), 2 * expected) < limit
    # DTensor.full_tensor() instead does not sum the gradients of the processes.
    weight = distribute_tensor(p.linear_weight, meshes[0][0], [Shard(0)]).requires_grad_()
    assert isinstance(weight, DTensor)
    flce.fused_linear_cross_entropy(inputs[rank], weight.full_tensor(), p.target).backward()
    assert relative_error(grad_of(weight).full_tensor(), expected) > 0.1  # type: ignore[attr-defined]
    # Gradients of many processes are summed in float32.
    big = distribute_tensor(torch.zeros(count, 1, dtype=torch.bfloat16, device=device()), meshes[0][0], [Shard(0)])
    full_weight = flce.gathered(big.requires_grad_())
    full_weight.backward(torch.full_like(full_weight, 256.0 if rank == 0 else 1.0))
    mean = (256.0 + count - 1) / count
    assert torch.equal(grad_of(big).to_local(), torch.full((1, 1), mean).to(big))  # type: ignore[attr-defined]
    plain = p.linear_weight
    assert flce.gathered(plain) is plain
    assert flce.gathered(plain, torch.bfloat16).dtype == torch.bfloat16


@no_gpu
def test_random_programs() -> None:
    """`python -m tests.search --only divided` runs more of them."""
    from tests.search import divided

    for seed in range(40):
        rng = random.Random(seed)
        call = {**divided.DEFAULTS, **divided.draw(rng, rng, "cpu")}
        found = set(world(most_processes()).run(divided.program, call)) - {None, "refused"}
        assert not found, f"{found}: {divided.KIND.line(call)}"
