"""Comparisons of DTensors as arguments of the linear losses with the float64 oracle, and with plain tensors."""

from __future__ import annotations

import itertools
import os
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

if not dist.is_available() or torch.cuda.device_count() == 1:
    pytest.skip("processes that share a GPU have no collectives of DTensors", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import flce
from flce.ops.dtensors import supports_divided_heads
from flce.testing.problem import Problem, run_oracle
from tests.distributed.split_head import CASES, LocalShare, device, problem, upstream_gradient
from tests.helpers import STATS
from tests.processes import in_processes, most_processes


@in_processes(most_processes())
def test_errors() -> None:
    """Check the errors for DTensors: a sharded weight may be meant as a shard or as the full weight."""
    p = problem((3, 4), 16, 41)
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    weight = distribute_tensor(p.linear_weight, mesh, [Shard(0)])
    with pytest.raises(ValueError, match=r"flce.gathered\(linear_weight\).*process_group"):
        flce.fused_linear_cross_entropy(p.input, weight, p.target)
    with pytest.raises(ValueError, match=r"flce.gathered\(linear_weight\).*process_group"):
        flce.linear_logprobs(p.input, weight, p.target)
    hidden = distribute_tensor(p.input, mesh, [Replicate()])
    with pytest.raises(ValueError, match=r"got a DTensor: give input.to_local\(\)"):
        flce.fused_linear_cross_entropy(hidden, p.linear_weight, p.target)
    with pytest.raises(ValueError, match=r"labels must be a plain tensor, got a DTensor: give labels.to_local\(\)"):
        flce.global_num_items(distribute_tensor(p.target, mesh, [Shard(1)]))
    tokens, plain = (
        distribute_tensor(p.input, mesh, [Shard(1)]),
        distribute_tensor(p.linear_weight, mesh, [Replicate()]),
    )
    labels = distribute_tensor(p.target, mesh, [Shard(1)])
    refused: list[tuple[str, dict[str, Any]]] = [
        ("input has placements", {"input": distribute_tensor(p.input, mesh, [Shard(2)])}),
        ("linear_weight must be Shard", {"linear_weight": distribute_tensor(p.linear_weight, mesh, [Shard(1)])}),
        ("process_group needs plain tensors", {"process_group": dist.group.WORLD}),
        ("linear_bias must be a DTensor on the mesh of linear_weight", {"linear_bias": p.linear_weight[:, 0]}),
        (r"adapters\[0\]\[0\] must be a DTensor on the mesh of input", {"adapters": [(p.input, weight)]}),
        ("target must be a DTensor on the mesh of input", {"input": tokens, "linear_weight": plain}),
        (
            r"weight must have shape \(41,\), all classes, got \(40,\)",
            {"input": tokens, "linear_weight": plain, "target": labels, "weight": p.linear_weight[:40, 0]},
        ),
        (
            "target must hold class indices in int64 or int32",
            {"input": tokens, "linear_weight": plain, "target": labels.double(), "weight": p.linear_weight[:, 0]},
        ),
    ]
    for message, given in refused:
        with pytest.raises((TypeError, ValueError), match=message):
            flce.fused_linear_cross_entropy(**{"input": hidden, "linear_weight": weight, "target": p.target} | given)
    for name, value, replacement in (
        ("target", distribute_tensor(p.target, mesh, [Replicate()]), "target.to_local()"),
        ("target", distribute_tensor(p.target, mesh, [Shard(1)]), "target.full_tensor()"),
        ("linear_bias", weight[:, 0], "linear_bias.to_local()"),
        ("token_weight", distribute_tensor(torch.ones(3, 4), mesh, [Replicate()]), "token_weight.to_local()"),
        ("adapters[0][1]", weight, "adapters[0][1].to_local()"),
        ("num_items", distribute_tensor(torch.tensor(3), mesh, [Replicate()]), "num_items.to_local()"),
    ):
        changed = {"adapters": [(p.input, value)]} if name == "adapters[0][1]" else {name: value}
        arguments: Any = {"target": p.target, "reduction": "sum", **changed}
        with pytest.raises(
            ValueError, match=re.escape(f"{name} must be a plain tensor, got a DTensor: give {replacement}")
        ):
            flce.fused_linear_cross_entropy(p.input, p.linear_weight, **arguments)


def _meshes() -> list[tuple[Any, list[Any], list[Any]]]:
    """Return meshes, with placements of input (B, S, H) and of weights on them."""
    count, kind = dist.get_world_size(), device().type
    one = init_device_mesh(kind, (count,))
    meshes: list[tuple[Any, list[Any], list[Any]]] = [
        (one, [Replicate()], [Shard(0)]),
        (one, [Shard(1)], [Shard(0)]),  # sequence parallel
        (one, [Shard(0)], [Shard(0)]),  # gathered by DTensor
        (one, [Shard(0)], [Replicate()]),
        (one, [Replicate()], [Replicate()]),
    ]
    if count == 4:
        two = init_device_mesh(kind, (2, 2))
        meshes += [
            (two, [Shard(0), Replicate()], [Replicate(), Shard(0)]),
            (two, [Shard(0), Shard(1)], [Replicate(), Shard(0)]),
            (two, [Shard(1), Shard(1)], [Replicate(), Shard(0)]),  # context and sequence parallel
            (two, [Replicate(), Shard(-2)], [Shard(0), Replicate()]),
        ]
    return meshes


@in_processes(most_processes())
def test_losses() -> None:
    """Compare losses, statistics and gradients of DTensors with the oracle, for uneven classes and tokens."""

    def check_gradient(leaf: Any, expected: Tensor, placements: Any) -> None:
        assert isinstance(leaf.grad, DTensor)
        assert [str(p) for p in leaf.grad.placements] == [str(p) for p in placements]
        torch.testing.assert_close(leaf.grad.full_tensor(), expected.to(leaf.grad.dtype), rtol=1e-9, atol=1e-12)

    kwargs: dict[str, dict[str, Any]] = {
        **CASES,
        "shifted": {"shift": 1, "ignored": 0.3, "z_loss": 0.1},
        "weights": {"class_weight": True, "shift": 1, "ignored": 0.2},
    }
    for (k, (mesh, tokens, classes)), (name, case_kwargs) in itertools.product(enumerate(_meshes()), kwargs.items()):
        if k and name in ("plain", "smoothing", "softcap"):
            continue
        p = problem((4, 8) if name != "shifted" else (3, 8), 16, 41, **case_kwargs)
        are_tokens_divided = any(
            c.is_replicate() and not t.is_replicate() for t, c in zip(tokens, classes, strict=True)
        )
        if are_tokens_divided and name in ("smoothing", "mean"):
            with pytest.raises(ValueError, match="weight together with z_loss"):
                _loss(p, mesh, tokens, classes)
            p = p.with_(reduction="sum")
        leaves, out = _loss(p, mesh, tokens, classes)
        upstream = upstream_gradient(p)
        expected = run_oracle(p.map(lambda t, letter: LocalShare.leaf(t) if letter == "t" else t), grad_output=upstream)
        if p.kwargs.get("reduction") == "none":
            assert isinstance(out.loss, DTensor)
            total: Any = (out.loss * distribute_tensor(upstream, mesh, out.loss.placements)).sum()
            total.full_tensor().backward()
        else:
            assert type(out.loss) is Tensor
            out.loss.backward(upstream)
        for result in ("loss", *STATS):
            value = getattr(out, result)
            value = value.full_tensor() if isinstance(value, DTensor) else value
            correct = getattr(expected, result)
            torch.testing.assert_close(value.to(correct.dtype), correct, rtol=1e-9, atol=1e-9)
        check_gradient(leaves["input"], expected.grad_input, leaves["input"].placements)
        check_gradient(leaves["weight"], expected.grad_weight, classes)
        if expected.grad_bias is not None:
            check_gradient(leaves["bias"], expected.grad_bias, classes)
        for (a, b), (da, db) in zip(leaves["adapters"], expected.grad_adapters, strict=True):
            check_gradient(a, da, leaves["input"].placements)
            check_gradient(b, db, classes)
        if expected.grad_token_weight is not None:
            check_gradient(leaves["token_weight"], expected.grad_token_weight, leaves["token_weight"].placements)


@in_processes(most_processes())
def test_results_of_tokens() -> None:
    """Compare `flce.linear_logprobs` with a call on plain tensors, and a compiled loss with an eager one."""
    p = problem((4, 8), 16, 41, ignored=0.2)
    candidates = torch.arange(32 * 3, device=device()).view(4, 8, 3) % 41
    temperature = torch.linspace(0.5, 1.5, 32, dtype=torch.float64, device=device()).view(4, 8)
    x, w, mask = LocalShare.leaf(p.input), LocalShare.leaf(p.linear_weight), candidates.sum(-1) % 3 > 0
    masked = p.target.where(mask, -100)
    expected = flce.linear_logprobs(x, w, masked, candidates=candidates, temperature=temperature, top_k=3, shift=1)
    names = ("logprob", "entropy", "candidate_logprob")
    gradients = torch.autograd.grad(sum(getattr(expected, name).sin().sum() for name in names), (x, w))
    for mesh, tokens, classes in _meshes():
        placed = [type(t)(t.dim % 3) if hasattr(t, "dim") else t for t in tokens]
        leaves: Any = [
            distribute_tensor(t.detach(), mesh, at).requires_grad_() for t, at in ((x, tokens), (w, classes))
        ]
        target, *others = (distribute_tensor(t, mesh, placed) for t in (p.target, candidates, temperature, mask))
        settings: Any = {
            **dict(zip(("candidates", "temperature", "mask"), others, strict=True)),
            "top_k": 3,
            "shift": 1,
        }
        out = flce.linear_logprobs(leaves[0], leaves[1], target, **settings)
        for name in (*names, "top_k_ids"):
            value = getattr(out, name)
            assert isinstance(value, DTensor)
            assert value.placements == target.placements
            torch.testing.assert_close(value.full_tensor(), getattr(expected, name))
        loss: Any = sum(getattr(out, name).sin().sum() for name in names)
        for got, correct in zip(torch.autograd.grad(loss.full_tensor(), leaves), gradients, strict=True):
            torch.testing.assert_close(got.full_tensor(), correct)
        lse = flce.linear_logprobs(leaves[0], leaves[1], outputs=("lse",)).lse
        assert isinstance(lse, DTensor)
        assert lse.placements == target.placements

        def loss_of(leaves: Any = leaves, target: Any = target) -> Any:
            return flce.fused_linear_cross_entropy(leaves[0], leaves[1], target, shift=1)

        if [str(t) for t in tokens] != (["S(1)"] if dist.get_world_size() == 2 else ["S(0)", "S(1)"]):
            continue  # compile one of the calls with sequence parallelism
        torch._dynamo.reset()
        graph = torch.compile(loss_of, fullgraph=True, backend="aot_eager")()
        got_gradients = torch.autograd.grad(graph, leaves)
        for got, correct in zip(got_gradients, torch.autograd.grad(loss_of(), leaves), strict=True):
            assert torch.equal(got.full_tensor(), correct.full_tensor())


@in_processes(most_processes())
def test_divergences() -> None:
    """Compare `flce.linear_divergence` with a call on plain tensors."""
    p, theirs = problem((4, 8), 16, 41, ignored=0.2, bias=True, adapter_ranks=(2,)), problem((4, 8), 12, 41, bias=True)
    ids = torch.arange(32 * 3, device=device()).view(4, 8, 3) % 41
    tensors: Any = {
        "student": p.input,
        "student_weight": p.linear_weight,
        "student_bias": p.linear_bias,
        "target": p.target,
        "teacher": theirs.input,
        "teacher_weight": theirs.linear_weight,
        "teacher_bias": theirs.linear_bias,
        "a": p.adapters[0][0],
        "b": p.adapters[0][1],
        "ids": ids,
        "logprob": torch.full(ids.shape, -2.0, dtype=torch.float64, device=device()),
    }
    outputs = ("divergence", "logprob", "entropy")

    def call(t: dict[str, Any], top_k: bool) -> Any:
        given = {name: x for name, x in t.items() if name.startswith(("student", "target", "teacher"))}
        given |= {"student_adapters": [(t["a"], t["b"])], "temperature": 0.8, "shift": 1, "outputs": outputs}
        if top_k:
            given = {name: x for name, x in given.items() if not name.startswith("teacher")}
            given["teacher_topk"] = t["ids"], t["logprob"]
        return flce.linear_divergence(**given, kind="jsd", beta=0.3, student_softcap=4.0)

    leaves = ("student", "student_weight", "student_bias", "a", "b")
    for (mesh, tokens, classes), top_k in itertools.product(_meshes(), (False, True)):
        plain = {name: LocalShare.leaf(x) if name in leaves else x for name, x in tensors.items()}
        placed = [type(t)(t.dim % 3) if hasattr(t, "dim") else t for t in tokens]
        of_classes = {"student_weight", "student_bias", "teacher_weight", "teacher_bias", "b"}
        divided: Any = {
            name: distribute_tensor(x, mesh, classes if name in of_classes else placed).requires_grad_(name in leaves)
            for name, x in tensors.items()
        }
        total, expected = (call(t, top_k) for t in (divided, plain))
        sums = []
        for name in outputs:
            value, correct = getattr(total, name), getattr(expected, name)
            assert value.placements == divided["target"].placements
            torch.testing.assert_close(value.full_tensor(), correct)
            sums.append((value.sin().sum().full_tensor(), correct.sin().sum()))
        sum(got for got, _ in sums).backward()
        sum(correct for _, correct in sums).backward()
        for name in leaves:
            assert divided[name].grad.placements == divided[name].placements
            torch.testing.assert_close(divided[name].grad.full_tensor(), plain[name].grad)
    for name, message in (
        ("teacher", "teacher must be a DTensor on the mesh of student"),
        ("a", "student_adapters.0."),
    ):
        with pytest.raises(ValueError, match=message):
            call({**divided, name: tensors[name]}, False)
    with pytest.raises(ValueError, match=r"student_weight is a DTensor.*flce.gathered\(student_weight\)"):
        call({**tensors, "student_weight": divided["student_weight"]}, False)


@in_processes(most_processes())
def test_different_settings() -> None:
    """Check that all processes of a mesh compare the arguments of calls with DTensors, before they redistribute."""
    os.environ["FLCE_DEBUG"] = "1"  # so that they do on a GPU, too
    p, is_last = problem((4, 8), 16, 41), dist.get_rank() == dist.get_world_size() - 1
    for mesh, tokens, classes in _meshes():
        x, weight = distribute_tensor(p.input, mesh, tokens), distribute_tensor(p.linear_weight, mesh, classes)
        target = distribute_tensor(p.target, mesh, [type(t)(t.dim % 3) if hasattr(t, "dim") else t for t in tokens])
        changes: list[tuple[str, Any]] = [("z_loss", 0.1), ("reduction", "sum"), ("shift", 1), ("target", None)]
        if all(t.is_replicate() for t in (*tokens, *classes)):
            changes = []  # No process needs another.
        for name, value in changes:
            arguments: dict[str, Any] = {"target": target, **({name: value} if is_last else {})}
            with pytest.raises(ValueError, match=f"given different arguments.*{name}"):
                flce.fused_linear_cross_entropy(x, weight, **arguments)
        flce.fused_linear_cross_entropy(x, weight, target)
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    logits = distribute_tensor(p.input @ p.linear_weight.T, mesh, [Shard(2)])
    with pytest.raises(ValueError, match=r"given different arguments.*z_loss=0 and 0.1"):
        flce.cross_entropy(logits, p.target, z_loss=0.1 * is_last)
    flce.cross_entropy(logits, p.target, z_loss=0.1)


@in_processes(most_processes())
def test_a_new_argument() -> None:
    """An argument that is added to a public function reaches the local call, and is compared."""
    got = []

    @supports_divided_heads
    def function(
        input: Tensor, linear_weight: Tensor, *, gamma: float = 0.0, vocab_size: Any = None, **rest: Any
    ) -> Any:
        got.append((type(input), tuple(linear_weight.shape[1:]), gamma))
        return flce.LinearLogprobsOutput()

    os.environ["FLCE_DEBUG"] = "1"
    p, is_last = problem((3, 4), 16, 41), dist.get_rank() == dist.get_world_size() - 1
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    x, weight = distribute_tensor(p.input, mesh, [Replicate()]), distribute_tensor(p.linear_weight, mesh, [Shard(0)])
    function(x, weight, gamma=0.5)
    assert got == [(Tensor, (16,), 0.5)]
    with pytest.raises(ValueError, match=r"given different arguments.*gamma=0.5 and 2"):
        function(x, weight, gamma=2.0 if is_last else 0.5)


def _loss(p: Problem, mesh: Any, tokens: list[Any], classes: list[Any]) -> tuple[dict[str, Any], Any]:
    def leaf(t: Tensor, placements: list[Any]) -> Any:
        return distribute_tensor(t.detach(), mesh, placements).requires_grad_()

    leaves: dict[str, Any] = {
        "input": leaf(p.input, tokens),
        "weight": leaf(p.linear_weight, classes),
        "bias": None if p.linear_bias is None else leaf(p.linear_bias, classes),
        "adapters": [(leaf(a, tokens), leaf(b, classes)) for a, b in p.adapters],
    }
    settings = dict(p.kwargs)
    placed = [type(t)(t.dim % 3) if hasattr(t, "dim") else t for t in tokens]
    if "token_weight" in settings:
        settings["token_weight"] = leaves["token_weight"] = leaf(settings["token_weight"], placed)
    out = flce.fused_linear_cross_entropy(
        leaves["input"],
        leaves["weight"],
        distribute_tensor(p.target, mesh, placed),
        linear_bias=leaves["bias"],
        adapters=leaves["adapters"],
        stats=STATS,
        **settings,
    )
    return leaves, out
