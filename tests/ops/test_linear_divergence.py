"""`flce.linear_divergence` against float64: teachers near the student, extreme logits, bad input."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import flce
from flce.backends.eager import divergence_bytes
from flce.core.problem import DIVERGENCES
from flce.core.sizes import parse_bytes
from flce.engine import case
from flce.planning.search import make_plan
from flce.testing.oracle import dense_logits
from flce.testing.problem import relative_error
from tests.hopper import logits_dtypes_on_a_gpu
from tests.planning.test_plan import peak_on_cpu

OUTPUTS = ("divergence", "logprob", "entropy")


def divergence_of(z: Tensor, t: Tensor, kind: str, beta: float = 0.5) -> Tensor:
    """Return the divergences of rows of logits of a student and a teacher, by their definitions."""
    s, t = z.log_softmax(-1), t.log_softmax(-1)

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(a == -torch.inf, 0.0, a.exp() * (a - b)).sum(-1)

    if kind == "forward_kl":
        return kl(t, s)
    if kind == "reverse_kl":
        return kl(s, t)
    mixture = ((1 - beta) * s.exp() + beta * t.exp()).log()
    return beta * kl(t, mixture) + (1 - beta) * kl(s, mixture)


def call_of(
    n: int = 11, hidden: int = 24, teacher_hidden: int = 16, vocab: int = 101, *, dtype: torch.dtype = torch.float32,
    device: Any = "cpu", **more: Any,
) -> SimpleNamespace:  # fmt: skip
    """Return tensors and arguments of a call with ignored tokens."""
    g = torch.Generator().manual_seed(n + vocab)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=g) * std).to(device, dtype)

    target = torch.randint(vocab, (n,), generator=g)
    target[1::5] = -100
    student = [normal(n, hidden).requires_grad_(), normal(vocab, hidden, std=0.4).requires_grad_()]
    teacher = [normal(n, teacher_hidden), normal(vocab, teacher_hidden, std=0.5)]
    kwargs: dict[str, Any] = {"target": target.to(device), **more}
    for name in ("student_bias", "teacher_bias"):
        if kwargs.pop(name, False):
            kwargs[name] = normal(vocab).requires_grad_(name == "student_bias")
    return SimpleNamespace(student=student, teacher=teacher, kwargs=kwargs)


def leaves(call: SimpleNamespace) -> list[Tensor]:
    bias = call.kwargs.get("student_bias")
    return [*call.student, *([] if bias is None else [bias])]


def oracle(call: SimpleNamespace, kind: str) -> tuple[Tensor, list[Tensor]]:
    """Return the divergences in float64, computed from the logits, and the leaves of their gradients."""
    made = [leaf.detach().double().requires_grad_() for leaf in leaves(call)]
    z, bias, target = dense_logits(*made), call.kwargs.get("teacher_bias"), call.kwargs["target"]
    t = dense_logits(*(each.detach().double() for each in (*call.teacher, *([] if bias is None else [bias]))))
    values = divergence_of(z, t, kind)
    return values if target is None else values * (target != -100), made


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_a_teacher_near_the_student(
    kind: str, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probabilities of a teacher within 1% of the student cancel. Rounded logits would lose all digits."""
    if device.type == "cpu":
        monkeypatch.setattr(case, "logits_dtypes", logits_dtypes_on_a_gpu)
        if backend == "triton":
            pytest.importorskip("tests.interpreted_bfloat16").fix_interpreter(monkeypatch)
    call = call_of(64, 128, 128, 1000, dtype=torch.bfloat16, device=device)
    call.teacher = [
        (t.detach() * (1 + 0.01 * torch.randn(t.shape, generator=torch.Generator().manual_seed(3)).to(t.device))).to(t)
        for t in call.student
    ]
    call.kwargs["target"] = None
    expected, made = oracle(call, kind)
    out: Any = flce.linear_divergence(*call.student, *call.teacher, kind=kind)
    assert relative_error(out.divergence.detach(), expected) <= 2e-3
    want = torch.autograd.grad(expected.sum(), made)
    got = torch.autograd.grad(out.divergence.sum(), leaves(call))
    assert all(relative_error(a, b) <= 5e-3 for a, b in zip(got, want, strict=True))


def test_equal_models_and_a_common_offset(backend: str) -> None:
    """Large common offsets of all logits cost no digits. The divergence of equal models is 0."""
    call = call_of(student_bias=True, teacher_bias=True)
    for name, offset in (("student_bias", 4096.0), ("teacher_bias", -8192.0)):  # powers of two round few digits
        bias = torch.zeros_like(call.kwargs[name]) + offset
        call.kwargs[name] = bias.requires_grad_(name == "student_bias")
    for kind in DIVERGENCES:
        expected, _ = oracle(call, kind)
        out: Any = flce.linear_divergence(*call.student, *call.teacher, kind=kind, **call.kwargs)
        assert relative_error(out.divergence.detach(), expected) <= 1e-3
        equal: Any = flce.linear_divergence(*call.student, *[t.detach() for t in call.student], kind=kind)
        assert float(equal.divergence.detach().abs().max()) <= 1e-6
        assert float(torch.autograd.grad(equal.divergence.sum(), call.student[0])[0].abs().max()) <= 1e-6


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_classes_of_minus_infinity(kind: str, backend: str) -> None:
    """Classes that both models exclude do not contribute."""
    call = call_of(5, student_bias=True, teacher_bias=True)
    kept = torch.arange(10, 101)
    for name in ("student_bias", "teacher_bias"):
        call.kwargs[name] = call.kwargs[name].detach().clone()
        call.kwargs[name][:10] = -torch.inf
    out: Any = flce.linear_divergence(*call.student, *call.teacher, kind=kind, **call.kwargs)
    x, w = (t.detach().double().requires_grad_() for t in call.student)
    z = x @ w[kept].T + call.kwargs["student_bias"][kept]
    t = (call.teacher[0] @ call.teacher[1][kept].T + call.kwargs["teacher_bias"][kept]).double()
    expected = divergence_of(z, t, kind) * (call.kwargs["target"] != -100)
    assert relative_error(out.divergence.detach(), expected) <= 3e-6
    want = torch.autograd.grad(expected.sum(), (x, w))
    got = torch.autograd.grad(out.divergence.sum(), call.student)
    assert all(relative_error(a, b) <= 3e-6 for a, b in zip(got, want, strict=True))


def test_only_the_student_has_a_gradient(backend: str) -> None:
    """Also if the teacher requires one. A frozen head gets none."""
    call = call_of()
    teacher = [t.requires_grad_() for t in call.teacher]
    call.student[1].requires_grad_(False)
    flce.linear_divergence(*call.student, *teacher).divergence.sum().backward()  # type: ignore[union-attr]
    assert [t.grad is None for t in (*call.student, *teacher)] == [False, True, True, True]


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_given_classes_of_the_teacher(kind: str) -> None:
    """All other classes are one class. -1 is an empty entry."""
    call = call_of(dtype=torch.float64, temperature=1.3)
    logprob = (call.teacher[0] @ call.teacher[1].T).log_softmax(-1)
    teacher_logprob, ids = logprob.topk(6)
    ids[0, 4:] = -1
    more: dict[str, Any] = {"beta": 0.2} if kind == "jsd" else {}
    more |= {"teacher_topk": (ids, teacher_logprob.float()), **call.kwargs}
    out: Any = flce.linear_divergence(call.student[0], call.student[1], kind=kind, outputs=OUTPUTS, **more)
    z = (call.student[0] @ call.student[1].T / 1.3).log_softmax(-1)
    expected = []
    for row in range(len(z)):
        found = ids[row][ids[row] >= 0]
        q = teacher_logprob.float().double()[row][: len(found)].exp()
        p = z[row][found].exp()
        lists = [torch.cat((each, 1 - each.sum(0, keepdim=True))).log() for each in (p, q)]
        expected.append(divergence_of(lists[0], lists[1], kind, 0.2))
    counts = call.kwargs["target"] != -100
    want = torch.stack(expected) * counts
    assert relative_error(out.divergence.detach(), want.detach()) <= 1e-10
    grads = (torch.autograd.grad(each.sum(), call.student, retain_graph=True) for each in (out.divergence, want))
    assert all(relative_error(a, b) <= 1e-10 for a, b in zip(*grads, strict=True))
    assert out.logprob is not None
    assert out.entropy is not None


def test_equal_given_classes_have_no_gradient() -> None:
    """The gradient of "jsd" is 0 where all probabilities are equal, which is no corner."""
    x, w = torch.randn(3, 8, requires_grad=True), torch.randn(20, 8)
    top, ids = (x.detach() @ w.T).log_softmax(-1).topk(4)
    out: Any = flce.linear_divergence(x, w, kind="jsd", beta=0.3, teacher_topk=(ids, top))
    assert float(torch.autograd.grad(out.divergence.sum(), x)[0].abs().max()) <= 1e-6


def wrong(**arguments: Any) -> dict[str, Any]:
    return arguments


BAD: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "classes": (ValueError, r"classes V, got 30 and 32.*give teacher_weight\[:30\]", wrong(teacher_weight=(32, 6))),
    "tokens": (ValueError, r"the same tokens.*got \(4, 8\) and \(5, 6\)", wrong(teacher=(5, 6))),
    "head": (ValueError, r"student_weight must have shape \(V, H\)", wrong(student_weight=(30, 7))),
    "teacher's head": (ValueError, "teacher_weight must .*the H of teacher, 6", wrong(teacher_weight=(30, 7))),
    "bias": (ValueError, r"teacher_bias must have shape \(30,\)", wrong(teacher_bias=(31,))),
    "adapters": (TypeError, r"student_adapters\[0\] must be a pair", wrong(student_adapters=[1])),
    "kind": (ValueError, "kind must be one of .*got 'kl'", wrong(kind="kl")),
    "beta": (ValueError, "beta needs kind='jsd', got beta=0.5 with kind='forward_kl'", wrong(beta=0.5)),
    "large": (ValueError, r"beta must be in \[0, 1\], got 1.5", wrong(beta=1.5, kind="jsd")),
    "output": (ValueError, "outputs must be names out of", wrong(outputs=("kl",))),
    "repeated": (ValueError, "outputs has 'entropy' twice", wrong(outputs=("entropy", "entropy"))),
    "a string": (ValueError, "outputs must be names out of .*got 'entropy'", wrong(outputs="entropy")),
    "no outputs": (ValueError, "outputs must be names out of .*got None", wrong(outputs=None)),
    "outputs in a list": (ValueError, r"outputs must be .*\[\['divergence'\]\]", wrong(outputs=[["divergence"]])),
    "a vector": (ValueError, r"teacher_weight must have shape \(V, H\), got \(6,\)", wrong(teacher_weight=(6,))),
    "no target": (ValueError, "'logprob', which needs a target", wrong(outputs=("logprob",))),
    "shift": (ValueError, "shift=1 needs a target", wrong(shift=1)),
    "softcap": (ValueError, "teacher_softcap must be None or a finite number > 0", wrong(teacher_softcap=-1.0)),
    "no teacher": (ValueError, "got None", wrong(teacher=None, teacher_weight=None)),
    "half a teacher": (ValueError, "give either .*got teacher", wrong(teacher_weight=None)),
    "both": (ValueError, "got teacher and teacher_weight and teacher_topk", wrong(teacher_topk=(1, 2))),
    "rounded": (
        ValueError, "linear_divergence never rounds logits",
        wrong(options=flce.ChunkOptions(logits_dtype=torch.bfloat16)),
    ),
    "dtype": (TypeError, "student and student_weight must have one", wrong(student_weight=torch.zeros(30, 8).double())),
    "temperatures": (ValueError, "temperature must be one number", wrong(temperature=torch.ones(4))),
    "no pair": (
        TypeError, "teacher_topk must be a pair of tensors, got Tensor",
        wrong(teacher=None, teacher_weight=None, teacher_topk=torch.zeros(4, 2)),
    ),
    "top k": (
        ValueError, r"teacher_topk must be .* of one shape, got \(4, 2\) and \(4, 3\)",
        wrong(teacher=None, teacher_weight=None, teacher_topk=(torch.zeros(4, 2).long(), torch.zeros(4, 3))),
    ),
    "top k's head": (
        ValueError, "teacher_topk replaces the teacher's head",
        wrong(teacher=None, teacher_weight=None, teacher_softcap=1.0, teacher_topk=(1, 2)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    error, message, given = BAD[name]
    shapes = {"student": (4, 8), "student_weight": (30, 8), "teacher": (4, 6), "teacher_weight": (30, 6)}
    arguments = {**shapes, **given}
    tensors = (*shapes, "student_bias", "teacher_bias")
    arguments = {
        key: torch.randn(value) if key in tensors and isinstance(value, tuple) else value
        for key, value in arguments.items()
    }
    with pytest.raises(error, match=message):
        flce.linear_divergence(**arguments)


@pytest.mark.parametrize("budget, products", [(None, 2), ("256MiB", 2), ("48MiB", 4)])
def test_products_of_jsd(budget: str | None, products: int) -> None:
    """Unless the budget is small, forward computes the statistics and the terms from the same logits."""
    n, hidden, vocab, options = 4096, 2048, 128256, flce.ChunkOptions(max_workspace_bytes=budget)
    how: Any = {"device_kind": "H200", "options": options, "input_grad": False, "weight_grad": False}
    plan = flce.plan(n, hidden, vocab, torch.bfloat16, teacher_hidden_size=hidden, **how)
    spec = replace(plan.case.spec, divergence="jsd", beta=0.5)  # type: ignore[call-arg]
    jsd = make_plan(replace(plan.case, spec=spec))
    assert round(jsd.flops / (2 * n * hidden * vocab)) == products
    assert jsd.workspace_bytes <= (plan.workspace_bytes if budget is None else parse_bytes(budget))


def test_temporary_memory_is_bounded() -> None:
    tile = torch.empty(4096, 4096, device="meta")
    assert 0 < divergence_bytes(tile, "cpu") <= 9 * (8 << 20)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [1024, 4096])
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_errors_at_a_large_vocabulary(kind: str, hidden: int) -> None:
    """1024 tokens, 128256 classes, a teacher within 1% of the student; gradients of the inputs against float64."""
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(1024, hidden, device="cuda", generator=g).bfloat16()
    w = (torch.randn(128256, hidden, device="cuda", generator=g) * 4 / hidden**0.5).bfloat16()
    noise = [1 + 0.01 * torch.randn(t.shape, device="cuda", generator=g) for t in (x, w)]
    teacher = [(t * factor).bfloat16() for t, factor in zip((x, w), noise, strict=True)]
    x.requires_grad_()
    out: Any = flce.linear_divergence(x, w.requires_grad_(), *teacher, kind=kind)
    got, _ = torch.autograd.grad(out.divergence.sum(), (x, w))
    for rows in torch.arange(1024, device="cuda").split(128):
        leaf = x.detach()[rows].double().requires_grad_()
        t = teacher[0][rows].double() @ teacher[1].double().T
        expected = divergence_of(leaf @ w.detach().double().T, t, kind)
        assert relative_error(out.divergence.detach()[rows], expected.detach()) <= 5e-3
        assert relative_error(got[rows], torch.autograd.grad(expected.sum(), leaf)[0]) <= 5e-3


@pytest.mark.parametrize("kind", ["forward_kl", "jsd"])
def test_memory_is_as_planned_on_a_cpu(kind: str, torch_backend: str) -> None:
    n, hidden, vocab = 512, 32, 4000
    options = flce.ChunkOptions(max_workspace_bytes=6 << 20)
    x, w, t, tw = (torch.randn(size, hidden) for size in (n, vocab, n, vocab))
    x, w = x.requires_grad_(), w.requires_grad_()

    def step() -> None:
        x.grad = w.grad = None
        out: Any = flce.linear_divergence(x, w, t, tw, kind=kind, options=options)
        out.divergence.sum().backward()

    step()
    plan = flce.plan(n, hidden, vocab, torch.float32, device="cpu", teacher_hidden_size=hidden, options=options)
    assert peak_on_cpu(step) - x.nbytes - w.nbytes <= plan.workspace_bytes <= 6 << 20
