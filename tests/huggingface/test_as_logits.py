"""Programs that must have equal values and gradients on a stock model and on a patched model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function_unary

from flce.huggingface import LazyLogits, MaterializedLogitsWarning
from tests.huggingface import fuzz
from tests.processes import run_python

SETUP = fuzz.Setup(bias=False)


class Sub(Tensor):
    """A tensor subclass of a user."""


def user_function(name: str) -> Callable[[Any], Any]:
    """Return a user's function with the name of a function of PyTorch."""

    def function(x: Any) -> Any:
        if has_torch_function_unary(x):
            return handle_torch_function(function, (x,), x)
        return x * 3.0

    function.__name__ = function.__qualname__ = name
    function.__module__ = "torch"
    return function


def trained(x: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(x)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        fuzz.loss_of(parameter * 2).backward()
        optimizer.step()
    return parameter


def doubled(gradients: Any) -> Any:
    return tuple(None if gradient is None else gradient * 2 for gradient in gradients)


def along(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the value of a function of `x` and its derivative in the direction of ones."""
    with forward_ad.dual_level():
        value, tangent = forward_ad.unpack_dual(function(forward_ad.make_dual(x, torch.ones(x.shape).to(x))))
        assert tangent is not None
        return torch.stack([value.detach(), tangent.detach()])


fuzz.TOOLS.update(
    Sub=Sub,
    user_function=user_function,
    trained=trained,
    doubled=doubled,
    along=along,
    functional_call=torch.func.functional_call,
)

PROGRAMS = {
    # Writes reach the logits.
    "a copy without gradients, and a hook on the logits": """
        with torch.no_grad(): t1 = lg.clone()
        lg.register_hook(lambda g: g * 3)
        lg *= 2
        note(t1.exp())
        loss1 = loss_of(lg)""",
    "the loss overwrites a product that was read": """
        t1 = lg * 2
        t2 = t1.softmax(-1).detach()
        loss1 = flce.cross_entropy(t1, labels(t1), shift=1, inplace=True)
        del t1""",
    "logits are detached in place after the loss": """
        loss1 = loss_of(lg)
        t1 = lg * 2
        note(lg.detach_() is lg, lg.requires_grad, lg.grad_fn, lg.is_leaf)
        t2 = lg * 2""",
    "logits are detached in place, and views keep their gradients": """
        t1 = lg.view(-1, 13)
        note(lg.detach_() is lg)
        loss1 = t1.square()""",
    "a copy from before a change, and a hook after it": """
        t1 = lg * 2
        lg.mul_(3.0)
        hook(lg, lambda gradient: gradient * 5)
        loss1 = loss_of(t1)
        loss2 = loss_of(lg)""",
    "a normalizer that is looked at": """
        t1 = lg.logsumexp(-1, keepdim=True)
        t1.register_hook(keep('t1'))
        t2 = lg - t1
        loss1 = t2.softmax(-1).gather(-1, chosen(lg)) + t2.gather(-1, chosen(lg))
        loss2 = (t2.softmax(-1) * t2).sum(-1)""",
    "a normalizer that cancels": """
        t1 = lg.detach() - lg.logsumexp(-1, keepdim=True)
        loss1 = (t1.softmax(-1) * t1.log_softmax(-1)).sum(-1) + lg.logsumexp(-1)
        loss2 = t1.softmax(-1).gather(-1, few(t1))
        loss3 = t1.log_softmax(-1).gather(-1, chosen(t1))
        note(lg.detach().logsumexp(-1).requires_grad)""",
    # No tokens.
    "classes of no tokens are written": """
        t1 = lg[:0]
        t2 = t1.clone()
        t2[..., :5].div_(0.5)
        t3 = t2 * 1
        note(t2.detach().numpy().shape, t3.detach().numpy().shape)
        loss1 = t3.sum()""",
    "logits are an output": """
        note(torch.neg(torch.ones_like(lg), out=lg.detach_()) is lg)
        t1 = lg * 2""",
    "detached logits become a leaf": """
        t1 = lg.detach()
        t1.requires_grad = True
        retain(t1)
        loss1 = loss_of(t1)""",
    "a function that may write": """
        t1 = F.elu(lg[:, -1], inplace=True)
        loss1 = loss_of(lg)
        loss2 = t1.square()""",
    "below __torch_function__": """
        lg += noise(13)
        with torch._C.DisableTorchFunctionSubclass(): t1 = torch.exp(lg); del lg
        loss1 = t1.sum()""",
    "a function after a write to a view": """
        t1 = lg.view(-1, 13)
        note(t1.isnan().any())
        t1.mul_(3.0)
        loss1 = Doubled.apply(lg).square()
        loss2 = Doubled.apply(t1[3:]).square()""",
    "a function that returns its input, detached": "loss1 = loss_of(Tripled.apply(lg, torch.detach))",
    "a function that returns a view": "loss1 = loss_of(Tripled.apply(lg, lambda x: x.view(2, 4, 13)))",
    # Hooks.
    "a hook on logits": """
        lg.register_hook(F.normalize)
        loss1 = loss_of(lg)""",
    "a hook on a node": """
        lg.grad_fn.register_hook(lambda inputs, outputs: doubled(inputs))
        loss1 = loss_of(lg)""",
    "a hook on the head": """
        model().head.register_full_backward_hook(lambda module, inputs, outputs: doubled(inputs))
        lg = a(ids)
        loss1 = loss_of(lg)""",
    "a hook before the head": """
        model().head.register_full_backward_pre_hook(lambda module, outputs: doubled(outputs))
        lg = a(ids)
        loss1 = loss_of(lg)""",
    # In stock the operation returns the logits themselves, so a hook on the result is a hook on the logits.
    "a hook on what there was nothing to do to": """
        t1 = lg.view(-1, 13)
        t3 = t1.flatten(0, -2)
        note(t3 is t1)
        hook(t3, lambda gradient: gradient * 3)
        loss1 = (t1 * 2).square()""",
    # Other ways to write to the memory of logits.
    "a parameter": """
        t1 = trained(lg.detach())
        note(isinstance(t1, nn.Parameter), t1.grad)
        loss1 = lg * 1.0""",
    "a subclass": """
        t1 = lg.as_subclass(Sub)
        note(type(t1) is Sub)
        loss1 = loss_of(t1).as_subclass(torch.Tensor)""",
    "other memory": """
        t1 = lg.detach()
        t2 = lg[0]
        lg.data = torch.ones_like(lg)
        note(t1[0].square())
        loss1 = t2.square()
        loss2 = loss_of(lg)""",
    "a shallow copy": """
        t1 = copy.copy(lg)
        t1.detach().mul_(2.0)
        loss1 = loss_of(t1)
        note(lg.detach().sum())""",
    # Transforms of functions.
    "the gradient of a temperature": "note(torch.func.grad(lambda t, x=lg: loss_of(x / t))(scalar(2.0)))",
    "vmap over logits": "loss1 = torch.func.vmap(lambda x: (x * x).sum(-1))(lg); del lg",
    "vmap of other tensors": """
        t1 = torch.stack([scalar(2.0), scalar(4.0)])
        loss1 = torch.func.vmap(lambda t, x=lg: (x.log_softmax(-1) * t).sum(-1))(t1)""",
    "a jacobian": "loss1 = torch.func.jacrev(lambda x: x.logsumexp(-1))(lg[0, :3]); del lg",
    # Forward-mode AD.
    "along a factor": """
        t1 = along(lambda t, x=lg: (x * t).log_softmax(-1).gather(-1, chosen(x)), scalar(2.0))""",
    "along a bias": "t1 = along(lambda t, x=lg: loss_of(x + t), noise(13))",
    "along what is added": """
        t1 = along(lambda t, x=lg, view=lg.view(-1, 13): x.add_(t).square().sum() + view.sum(), noise(13))""",
    "along logits": "t1 = along(lambda x: x.sum(), lg)",
    "along a weight": """
        t1 = along(lambda t: loss_of(functional_call(model(), {'head.weight': t}, (ids,))), model().head.weight)""",
    # Functions of users run as they are, even with names of PyTorch's functions.
    **{
        f"a function named {name}": f"loss1 = user_function('{name}')(lg)"
        for name in ("tanh", "cross_entropy", "mul_", "__hash__")
    },
}


@pytest.mark.parametrize("read_first", [False, True], ids=["gradients first", "values first"])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_program(name: str, read_first: bool) -> None:
    steps = tuple(line.strip() for line in PROGRAMS[name].strip().splitlines())
    roots = tuple(each for step in steps for each in fuzz.assigned_names(step) if each.startswith("loss"))
    fuzz.compare(SETUP, steps, roots, read_first, limits=False)


AUTOCAST = """
    with torch.autocast('cpu', torch.bfloat16): lg = a(ids)
    {mode}: t1 = F.log_softmax(lg, -1)
    {mode}: t2 = lg.float().log_softmax(-1)
    {mode}: t3 = lg[..., [1, 5]]
    {mode}: loss1 = t1.sum(-1) / 13
    {mode}: loss2 = t2.sum(-1) / 13
    {mode}: loss3 = t1.gather(-1, chosen(lg))
    {mode}: loss4 = t2.gather(-1, chosen(lg))
    {mode}: loss5 = F.cross_entropy(lg.flatten(0, 1), labels(lg).flatten())
"""


def test_a_write_after_a_view_of_the_only_class() -> None:
    steps = ("lg = a(ids)", "t1 = lg[..., 0]", "lg.div_(noise(lg.shape[:-1]).abs().unsqueeze(-1))")
    fuzz.compare(fuzz.Setup(bias=False, head=(1, 5)), steps)


def test_no_tokens_with_a_bias() -> None:
    steps = ("t1 = lg[:0]", "t2 = t1 * t1.detach().mean()", "loss1 = t2.sum()")
    fuzz.compare(fuzz.Setup(), steps, ("loss1",), limits=False)


@pytest.mark.parametrize(
    "step",
    [
        "loss1 = (lg + t1).logsumexp(-1)",
        "loss1 = lg.softmax(-1) * t1",
        "loss1 = torch.cat([lg, t1])",
        "loss1 = t1.log_softmax(1).gather(1, ids[:, None])",
        "loss1 = t1[:, 1:].transpose(1, 2)",
        "note(t1.mul_(2.0) is t1); loss1 = lg * 1.0",
        "t1[:, 3] = 1.0; loss1 = loss_of(lg)",
        "loss1 = Doubled.apply(t1).square()",
    ],
)
def test_transposed_logits_of_as_many_tokens_as_classes(step: str) -> None:
    fuzz.compare(fuzz.Setup(shape=(2, 13)), ("t1 = lg.transpose(1, 2)", step), ("loss1",), limits=False)


def test_writes_to_many_views_take_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write changes the nodes of its own view and of the logits, not the nodes of views of other tokens."""
    nodes: list[LazyLogits] = []
    update = LazyLogits._take_over_node

    def counted(lazy: LazyLogits, is_written: bool) -> None:
        nodes.append(lazy)
        update(lazy, is_written)

    monkeypatch.setattr(LazyLogits, "_take_over_node", counted)
    logits = fuzz.Run(fuzz.Setup(shape=(2, 40)), patched=True).tensors["lg"]
    views = [logits[:, i] for i in range(40)]
    for view in views:
        view.mul_(2.0)
    assert len(nodes) <= 3 * len(views)


@pytest.mark.parametrize("inside", [True, False])
def test_autocast(inside: bool) -> None:
    """Autocast around the head only, and around the operations on logits too."""
    mode = "with torch.autocast('cpu', torch.bfloat16)" if inside else "if True"
    steps = tuple(line.strip() for line in AUTOCAST.format(mode=mode).strip().splitlines())
    losses = [f"loss{i}" for i in range(1, 6)]
    fuzz.compare(fuzz.Setup("float32", adapter=True), steps, losses, limits=False, tolerance=0.02)


def test_a_small_slice_is_read_by_itself() -> None:
    run = fuzz.Run(SETUP, patched=True)
    run.step("t1 = lg[:, -1].sigmoid()")
    assert run.tensors["lg"].is_materialized is False


# ---------------------------------------------------------------------------------------------- errors

SAME_TYPE = (
    "F.cross_entropy(lg.flatten(0, 1), labels(lg).flatten(), weight=[1.0] * 13)",
    "F.cross_entropy(lg.flatten(0, 1), labels(lg).flatten(), weight=torch.ones(13, requires_grad=True))",
    "F.cross_entropy(lg.view(-1, 13), labels(lg))",
    "F.cross_entropy(lg.flatten(0, 1), chosen(lg).flatten() + 13)",
    "lg.transpose(0, 3)",
    "lg[:, 9]",
    "lg[..., [13]]",
    "lg.narrow(1, 3, 5)",
    "torch.cat([lg, lg[:1, :3]], dim=0)",
    "lg + lg[:, :3]",
)
SAME_TEXT = (
    "F.cross_entropy(lg.flatten(0, 1), labels(lg).flatten(), label_smoothing=1.5)",
    "F.cross_entropy(lg.flatten(0, 1), labels(lg).flatten(), weight=torch.ones(12))",
    "F.cross_entropy(lg.flatten(0, 1), labels(lg).flatten(), weight=torch.ones(1, 13))",
    "F.cross_entropy(lg.flatten(0, 1), labels(lg).flatten(), ignore_index=None)",
    "lg.view(7, 13)",
    "lg.reshape(-2, -2, 13)",
    "lg[torch.ones(2, 8, dtype=torch.bool)]",
    "lg.gather(-1, torch.full((2, 4, 1), 13))",
    "lg.log_softmax(-1).gather(-1, torch.full((2, 4, 1), -1))",
    "lg.split([4, 4], 1)",
    "lg.squeeze(3)",
    "lg.logsumexp(-4)",
    "lg.logsumexp(3)",
    "lg.movedim((0, 1), (0, 3))",
)


@pytest.mark.parametrize("code", [*SAME_TYPE, *SAME_TEXT])
def test_errors_are_those_of_stock(code: str) -> None:
    """Errors about sizes contain the size of the logits."""
    errors = []
    for patched in (False, True):
        with pytest.raises(Exception) as raised:  # noqa: PT011  # compared below
            fuzz.Run(SETUP, patched).step(code)
        errors.append((type(raised.value), str(raised.value) if code in SAME_TEXT else ""))
    assert errors[1] == errors[0]


def after_the_loss() -> fuzz.Run:
    run = fuzz.Run(SETUP, patched=True)
    run.step("loss1 = loss_of(lg)")
    return run


@pytest.mark.parametrize(
    "code",
    ["lg.register_hook(F.normalize)", "lg.retain_grad()", "torch.autograd.graph.register_multi_grad_hook([lg], print)"],
)
def test_a_hook_after_the_loss_is_an_error(code: str) -> None:
    with pytest.raises(RuntimeError, match="after the loss"):
        after_the_loss().step(code)
    for steps in (("t1 = lg[:, :-1].float()", "t2 = t1 * 2", "t2.square()"), ("t1 = lg.view(lg.shape)", "lg.div_(2)")):
        run = fuzz.Run(fuzz.Setup(), True)
        for step in steps:
            run.step(step)
        with pytest.raises(RuntimeError, match="after something else was computed"):
            run.step(code)


@pytest.mark.parametrize("given", ["lg", "lg[:, :-1]"])
@pytest.mark.parametrize("hook", ["lg.register_hook(F.normalize)", "lg.retain_grad()"])
def test_a_hook_after_a_function_is_an_error(given: str, hook: str) -> None:
    """The hook would miss the gradient of the Function. An earlier hook gets it (`PROGRAMS`)."""
    run = fuzz.Run(fuzz.Setup(), True)
    for step in ("lg = a(ids)", f"x = Doubled.apply({given})", hook):
        run.step(step)
    with pytest.raises(RuntimeError, match="were passed to an autograd"):
        run.step("(lg.sum() + x.sum()).backward()")


@pytest.mark.parametrize("view", ["view(-1)[3:]", "transpose(1, 2)[:, 2:]", "diagonal(0, 1, 2)"])
def test_a_function_after_a_write_to_a_real_view_is_an_error(view: str) -> None:
    """Such a view is an ordinary tensor. The gradient of the Function would leave the write out."""
    run = fuzz.Run(fuzz.Setup(), True)
    for step in ("lg = a(ids)", f"t = lg.{view}", "t.detach().mul_(2)", "Doubled.apply(lg)", "t.mul_(2)"):
        run.step(step)
    with pytest.raises(RuntimeError, match=r"Scaled.apply\(\) of logits that were written to through a view"):
        run.step("Doubled.apply(lg)")


def test_the_node_after_the_loss_is_a_warning() -> None:
    with pytest.warns(MaterializedLogitsWarning, match="grad_fn after the loss"):
        after_the_loss().step("assert lg.grad_fn is not None")


def test_a_capsule_is_an_error() -> None:
    """PyTorch does not call `__torch_function__` there. Without memory the capsule would be invalid."""
    script = (
        "import torch\n"
        "from flce.huggingface.lazy import make_lazy\n"
        "from flce.huggingface.lazy.state import head_state\n"
        "logits = make_lazy(head_state(torch.ones(2, 3), torch.ones(5, 3), None))\n"
        "try:\n"
        "    print('a capsule', torch.from_dlpack(torch.utils.dlpack.to_dlpack(logits.detach())))\n"
        "except Exception as error:\n"
        "    print('an error:', error)\n"
    )
    assert run_python("-c", script).stdout.startswith("an error:")


@pytest.mark.filterwarnings("ignore::flce.huggingface.MaterializedLogitsWarning")
def test_the_hash_is_stable() -> None:
    logits = fuzz.Run(SETUP, patched=True).tensors["lg"]
    before, names = hash(logits), {logits: "logits"}
    logits.mul_(2.0)
    assert hash(logits) == before
    logits.exp_()
    assert logits.is_materialized
    assert hash(logits) == before
    assert names[logits] == "logits"
