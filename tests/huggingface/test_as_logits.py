"""Lazy logits are logits: programs that run on a stock and on a patched model, with the same values and gradients."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import register_multi_grad_hook
from torch.overrides import handle_torch_function, has_torch_function_unary

import flce
from flce.huggingface import MaterializedLogitsWarning, patch_model
from flce.huggingface.lazy import is_lazy
from flce.huggingface.lazy.tables import OPERATIONS
from tests.huggingface.fuzz import DoubledInPlace

V = 97
IDS = torch.randint(3, V, (2, 9), generator=torch.Generator().manual_seed(1))
FIRST = torch.arange(V) < 40
MASK = IDS > 40
Build = Callable[..., Any]
Calls = list[dict[str, Any]]
Program = Callable[[Any], Any]

pytestmark = pytest.mark.filterwarnings("ignore::flce.huggingface.MaterializedLogitsWarning")


@pytest.fixture
def models(build: Build) -> tuple[Any, Any]:
    """The same model in float64, stock and patched."""
    stock = build("Llama", num_hidden_layers=1).double()
    return stock, patch_model(copy.deepcopy(stock))


def logits_of(model: Any) -> Any:
    """The logits, after a check that those of a patched model are lazy."""
    logits = model(input_ids=IDS).logits
    assert is_lazy(logits) == hasattr(model, "_flce")
    return logits


def loss_of(logits: Any) -> Tensor:
    """The loss of the next token."""
    return F.cross_entropy(logits[:, :-1].reshape(-1, V), IDS[:, 1:].reshape(-1))


def outcome(model: Any, program: Program) -> tuple[list[Any], dict[str, Tensor | None]]:
    """What a program returns, one value or a tuple, and the gradients of its sum."""
    model.zero_grad()
    result = program(model)
    values = [value.materialize() if is_lazy(value) else value for value in _several(result)]
    sums = [value.sum().double() for value in values if isinstance(value, Tensor) and value.requires_grad]
    if sums:
        torch.stack(sums).sum().backward()
    values = [value.detach() if isinstance(value, Tensor) else value for value in values]
    return values, {name: parameter.grad for name, parameter in model.named_parameters()}


def _several(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, tuple) else (result,)


def assert_same(models: tuple[Any, Any], program: Program, **tolerance: Any) -> None:
    """The same values of a stock model and a patched one, and the same gradients; None where stock has None."""
    want, got = (outcome(model, program) for model in models)
    torch.testing.assert_close(got, want, **tolerance)


def named(*programs: Program) -> Any:
    """Parametrised over functions, with their names."""
    return pytest.mark.parametrize("program", programs, ids=lambda program: program.__name__)


# ----------------------------------------------------------------------------------------------- writes


def scale_a_view_that_was_read(model: Any) -> Any:
    logits = logits_of(model)
    flat = logits.view(-1, V)
    assert not flat.isnan().any()
    flat /= 0.5
    return loss_of(logits)


def clear_a_detached_view_that_was_read(model: Any) -> Any:
    logits = logits_of(model)
    detached = logits.detach()
    total = detached.sum()
    detached.zero_()
    return loss_of(logits), total


def filter_the_last_token(model: Any) -> Any:
    logits = logits_of(model)
    last = logits[:, -1, :]
    values, _ = last.topk(5)
    last[last < values[:, [-1]]] = -torch.inf
    return logits.softmax(-1) * FIRST, logits[:, -1].softmax(-1).square()


def filter_the_last_token_without_gradients(model: Any) -> Any:
    logits = logits_of(model)
    with torch.no_grad():
        last = logits[:, -1, :]
        values, _ = last.topk(5)
        last[last < values[:, [-1]]] = -torch.inf
    return logits.softmax(-1) * FIRST


def overwrite_by_the_own_loss(model: Any) -> Any:
    return flce.cross_entropy(logits_of(model), IDS, shift=1, inplace=True)


def overwrite_a_product_that_was_read(model: Any) -> Any:
    logits = logits_of(model) * 2
    best = logits.softmax(-1).detach()
    return flce.cross_entropy(logits, IDS, shift=1, inplace=True), best


@named(
    scale_a_view_that_was_read,
    clear_a_detached_view_that_was_read,
    filter_the_last_token,
    filter_the_last_token_without_gradients,
    overwrite_by_the_own_loss,
    overwrite_a_product_that_was_read,
)
def test_writes_reach_the_logits(program: Program, models: tuple[Any, Any]) -> None:
    assert_same(models, program)


def test_a_small_slice_is_read_by_itself(models: tuple[Any, Any]) -> None:
    def read_and_write(model: Any) -> Any:
        logits = logits_of(model)
        last = logits[:, -1]
        values = last.softmax(-1)
        if is_lazy(logits):
            assert logits.is_materialized is False
        last.mul_(3.0)
        return values.square(), logits * FIRST, last * FIRST

    assert_same(models, read_and_write)


def infinite_classes(model: Any) -> Any:
    logits = logits_of(model)
    logits[..., FIRST] = -torch.inf
    return (logits**2).nan_to_num(posinf=1.0)


def infinite_classes_of_a_copy(model: Any) -> Any:
    logits = logits_of(model).masked_fill(FIRST, -torch.inf)
    return (logits * logits).nan_to_num(posinf=1.0)


@named(infinite_classes, infinite_classes_of_a_copy)
def test_gradients_that_are_no_numbers_stay_at_filled_classes(program: Program, models: tuple[Any, Any]) -> None:
    assert_same(models, program)
    assert all(parameter.grad.isfinite().all() for parameter in models[1].parameters())


IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda x: x.mul_(2),
    "add_": lambda x: x.add_(torch.ones(V, dtype=torch.float64)),
    "neg_": lambda x: x.neg_(),
    "torch.neg_": lambda x: torch.neg_(x),
    "tanh_": lambda x: x.tanh_(),
    "masked_fill_": lambda x: x.masked_fill_(FIRST, -1.0),
    "zero_": lambda x: x.zero_(),
    "clamp_": lambda x: x.clamp_(max=0.1),
    "torch.exp_": lambda x: torch.exp_(x),
    "F.relu_": lambda x: F.relu(x, inplace=True),
    "copy_": lambda x: x.copy_(torch.ones(V, dtype=torch.float64)),
    "requires_grad_": lambda x: x.requires_grad_(),
    "iadd": lambda x: x.__iadd__(1.0),
    "detach_": lambda x: x.detach_(),
    "out": lambda x: torch.neg(torch.ones_like(x), out=x.detach_()),
}


@pytest.mark.parametrize("read", [False, True], ids=["not read", "read"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_operations_in_place_return_the_object(name: str, read: bool, models: tuple[Any, Any]) -> None:
    def change(model: Any) -> Any:
        logits = logits_of(model)
        if read:
            logits.isnan()
        returned = IN_PLACE[name](logits)
        assert returned is logits
        return returned * 2

    assert_same(models, change)


def clone(values: Any) -> Any:
    return values.clone()


def masked(values: Any) -> Any:
    return values[MASK]


def joined(values: Any) -> Any:
    return torch.cat([values])


def cast(values: Any) -> Any:
    return values.to(torch.float64, copy=True)


@pytest.mark.parametrize("read", [False, True], ids=["not read", "read"])
@named(clone, masked, joined, cast)
def test_copies_of_log_probabilities_are_changed_alone(program: Program, read: bool, models: tuple[Any, Any]) -> None:
    """Their memory is one that backward of log_softmax does not need."""

    def change_the_copy(model: Any) -> Any:
        values = F.log_softmax(logits_of(model), -1)
        if read:
            values.isnan()
        copied = program(values)
        copied[..., 3] = 0.0
        copied.mul_(2.0)
        return copied.square(), values.square()

    assert_same(models, change_the_copy)


def some_of_all(values: Any) -> Any:
    return values[:, -1, [3, 4]]


def some_of_each(values: Any) -> Any:
    return values.gather(-1, IDS[..., None])


def one_of_a_row(values: Any) -> Any:
    return values[[1], :, 5]


@named(some_of_all, some_of_each, one_of_a_row)
@pytest.mark.parametrize("function", [torch.tanh, lambda x: x.log_softmax(-1)], ids=["tanh", "log_softmax"])
def test_picked_values_are_changed_alone(function: Program, program: Program, models: tuple[Any, Any]) -> None:
    def change_what_was_picked(model: Any) -> Any:
        picked = program(function(logits_of(model)))
        picked.mul_(2.0)
        return picked.square()

    assert_same(models, change_what_was_picked)


# ------------------------------------------------------------------------------- long chains, many views


def many_products(logits: Any) -> Any:
    for _ in range(500):
        logits = logits * 1.001
    return logits


def many_views(logits: Any) -> Any:
    for _ in range(250):
        logits = logits.view(-1, V)[:, :]
    return logits.view(2, 9, V)


def many_written_views(logits: Any) -> Any:
    rows = [logits[i, j] for i in range(2) for j in range(9)]
    columns = [logits[..., i] for i in range(V)]
    block = logits[1:, 2:5, 3:50]
    for factor, view in enumerate((*rows, *columns, block, logits.mT)):
        view.mul_(1 + factor / 100)
    return rows[3].sum() + columns[7].sum() + block.sum() + logits


@pytest.mark.parametrize("read", ["not", "before", "after"])
@named(many_products, many_views, many_written_views)
def test_many(program: Program, read: str, models: tuple[Any, Any]) -> None:
    def run(model: Any) -> Any:
        logits = logits_of(model)
        if read == "before":
            logits.register_hook(lambda gradient: gradient * 3)
        result = program(logits)
        if read == "after":
            logits.register_hook(lambda gradient: gradient * 3)
        return loss_of(result), loss_of(logits)

    assert_same(models, run)


def written_parts_of_a_view(model: Any) -> Any:
    """Functions of PyTorch's C++ code find each view where the last write to its memory has left it."""
    logits = logits_of(model)
    whole, row, other, part, column = logits[:], logits[0], logits[1], logits[:, 2:5], logits[..., 7]
    row.mul_(2.0)
    other[3].mul_(3.0)
    column.fill_(1.0)
    return tuple(Plain.apply(view).square() for view in (whole, row, other, part, column, logits))


# ----------------------------------------------------------------------------------- whose function it is

CLASS_WEIGHT = torch.linspace(0.5, 1.5, V, dtype=torch.float64)
TOKEN_WEIGHT = torch.linspace(0.0, 1.0, IDS.numel(), dtype=torch.float64).view(IDS.shape)
OWN_OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "shift": {"shift": 1},
    "softcap and z_loss": {"softcap": 3.0, "z_loss": 1e-2, "shift": 1},
    "scales": {"logit_scale": 0.5, "temperature": 2.0, "shift": 2},
    "smoothed sum": {"label_smoothing": 0.1, "reduction": "sum", "ignore_index": 5},
    "in place": {"inplace": True, "shift": 1},
    "class weights": {"weight": CLASS_WEIGHT, "reduction": "none"},
    "stats": {"stats": ("lse", "logprob", "entropy", "argmax", "correct"), "z_loss": 1e-3, "shift": 1},
}


@pytest.mark.parametrize("as_module", [False, True], ids=["function", "module"])
@pytest.mark.parametrize("name", OWN_OPTIONS)
def test_own_cross_entropy(name: str, as_module: bool, models: tuple[Any, Any]) -> None:
    def own_loss(model: Any) -> Any:
        logits, options = logits_of(model) * 2, OWN_OPTIONS[name]
        if as_module:
            return flce.CrossEntropyLoss(**options)(logits, IDS, token_weight=TOKEN_WEIGHT)
        return flce.cross_entropy(logits, IDS, **options)

    assert_same(models, own_loss)


@pytest.mark.parametrize("own_loss", [flce.cross_entropy, flce.CrossEntropyLoss()], ids=["function", "module"])
def test_own_cross_entropy_is_fused(own_loss: Callable[..., Any], models: tuple[Any, Any], fused_calls: Calls) -> None:
    logits = logits_of(models[1])
    own_loss(logits, IDS)
    assert len(fused_calls) == 1
    assert logits.is_materialized is False


@torch.library.custom_op("flce_as_logits::tanh", mutates_args=())
def custom_tanh(x: Tensor) -> Tensor:
    return x * 3.0


custom_tanh.register_autograd(lambda ctx, grad: grad * 5.0)


def of_a_custom_op(x: Any) -> Any:
    return custom_tanh(x)


def of_torch_ops(x: Any) -> Any:
    return torch.ops.flce_as_logits.tanh(x)


def of_an_overload(x: Any) -> Any:
    return torch.ops.flce_as_logits.tanh.default(x)


@named(of_a_custom_op, of_torch_ops, of_an_overload)
def test_a_custom_op_runs_whatever_its_name(program: Program, models: tuple[Any, Any]) -> None:
    assert_same(models, lambda model: program(logits_of(model)))
    assert_same(models, lambda model: program(logits_of(model).tanh()[:, 1:] * 2).square())
    logits = logits_of(models[1])
    torch.testing.assert_close(program(logits), logits.materialize() * 3.0)


@pytest.mark.parametrize("name", ["tanh", "float", "argmax", "cross_entropy", "detach", "mul_", "shape", "__hash__"])
def test_a_function_of_the_user_runs_whatever_its_name(name: str, models: tuple[Any, Any]) -> None:
    def function(x: Any) -> Any:
        if has_torch_function_unary(x):
            return handle_torch_function(function, (x,), x)
        return x * 3.0

    function.__name__ = function.__qualname__ = name
    function.__module__ = "torch"
    assert_same(models, lambda model: function(logits_of(model)))
    logits = logits_of(models[1])
    torch.testing.assert_close(function(logits), logits.materialize() * 3.0)


class Recorder(Tensor):
    """Notes what torch hands to ``__torch_function__``."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        HANDED.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


HANDED: list[Any] = []
JOINS = ("stack", "cat", "concat", "concatenate")
# What the operations are called with, beside the tensor.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "view reshape": ((-1,),),
    "transpose swapaxes swapdims": (0, 1),
    "permute": ((1, 0),),
    "movedim moveaxis select": (0, 1),
    "unsqueeze __getitem__ unbind log_softmax argmax logsumexp sum squeeze": (0,),
    "split chunk": (2,),
    "narrow": (0, 0, 1),
    "index_select": (0, torch.tensor([0])),
    "gather": (0, torch.tensor([[0]])),
    "take_along_dim": (torch.tensor([[0]]), 0),
    "to type": (torch.float64,),
    "type_as": (torch.ones(1),),
    "masked_fill masked_fill_": (torch.tensor(True), 0.0),
    "cross_entropy nll_loss": (torch.tensor([0, 1]),),
    "__setitem__": (0, 1.0),
    "mul multiply __mul__ __rmul__ div divide true_divide __truediv__ add __add__ __radd__ sub subtract __sub__": (2,),
    "mul_ multiply_ __imul__ div_ divide_ true_divide_ __itruediv__ __idiv__": (2,),
    "add_ __iadd__ sub_ subtract_ __isub__": (2,),
}


def test_operations_are_what_torch_hands_over() -> None:
    """A table is of use only with the functions that ``__torch_function__`` is given."""
    arguments = {name: args for names, args in ARGUMENTS.items() for name in names.split()}
    homes: dict[str, Any] = {"Tensor": Tensor, "torch": torch, "F": F, "torch.special": torch.special}
    functions = {f"{home}.{name}": _function(members, name) for home, members in homes.items() for name in dir(members)}
    functions["flce.cross_entropy"] = flce.cross_entropy
    assert OPERATIONS.keys() <= set(functions.values())
    known = {full.split(".")[-1]: OPERATIONS[member] for full, member in functions.items() if member in OPERATIONS}
    not_found, not_asked = [], []
    for full, function in functions.items():
        name = full.split(".")[-1]
        if function is None or (name not in known and function not in OPERATIONS):
            continue
        x = torch.ones(2, 2).as_subclass(Recorder)
        HANDED.clear()
        function([x, x] if name in JOINS else x, *arguments.get(name, ()))
        operations = [OPERATIONS[handed] for handed in HANDED if handed in OPERATIONS]
        if OPERATIONS.get(function, known[name]) not in operations:
            not_found.append(full)
        # Operators become methods on their way; but the plain lazy logits hand over the operators themselves.
        if function in OPERATIONS and function not in HANDED and not name.startswith("__"):
            not_asked.append(full)
    assert not_found == []
    assert not_asked == ["F.tanh"]  # calls the method


def _function(members: Any, name: str) -> Any:
    """A function, method or getter; None for anything else."""
    member = getattr(members, name, None)
    member = member if callable(member) else getattr(member, "__get__", None)
    return member if getattr(member, "__hash__", None) is not None else None


# ------------------------------------------------------------------------------------- autograd.Function


class Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad


def dirty_logits(model: Any) -> Any:
    logits = logits_of(model)
    returned = DoubledInPlace.apply(logits)
    return loss_of(logits), loss_of(returned)


def dirty_logits_that_were_read(model: Any) -> Any:
    logits = logits_of(model)
    before = logits.softmax(-1).square().sum()
    DoubledInPlace.apply(logits)
    return loss_of(logits), before


def dirty_view(model: Any) -> Any:
    logits = logits_of(model)
    DoubledInPlace.apply(logits.view(-1, V))
    return loss_of(logits)


def dirty_slice(model: Any) -> Any:
    logits = logits_of(model)
    DoubledInPlace.apply(logits[:, 2:5])
    return loss_of(logits)


def filled_sum(model: Any) -> Any:
    logits = logits_of(model)
    return loss_of((logits + logits).masked_fill(FIRST, 3.0))


def of_logits(model: Any) -> Any:
    logits = logits_of(model)
    return loss_of(Plain.apply(logits)), loss_of(logits)


def of_a_slice(model: Any) -> Any:
    return Plain.apply(logits_of(model)[:, 1:]).square()


def of_a_product(model: Any) -> Any:
    return Plain.apply(logits_of(model).tanh() * 2).square()


def after_a_write(model: Any) -> Any:
    logits = logits_of(model)
    logits[:, 0] = 1.0
    return Plain.apply(logits).square()


def after_a_write_to_a_view(model: Any) -> Any:
    logits = logits_of(model)
    flat = logits.view(-1, V)
    flat.isnan()
    flat.mul_(3.0)
    return Plain.apply(logits).square(), Plain.apply(flat[3:]).square()


def after_a_write_that_stays_lazy(model: Any) -> Any:
    logits = logits_of(model)
    logits.mul_(3.0)
    return Plain.apply(logits).square()


@named(
    dirty_logits,
    dirty_logits_that_were_read,
    dirty_view,
    dirty_slice,
    filled_sum,
    of_logits,
    of_a_slice,
    of_a_product,
    after_a_write,
    after_a_write_to_a_view,
    written_parts_of_a_view,
    after_a_write_that_stays_lazy,
)
def test_autograd_functions(program: Program, models: tuple[Any, Any]) -> None:
    assert_same(models, program)


# ------------------------------------------------------------------------------------------------- hooks


def doubled(gradients: Any) -> Any:
    return tuple(None if gradient is None else gradient * 2 for gradient in gradients)


def hook_on_logits(model: Any) -> Any:
    logits = logits_of(model)
    logits.register_hook(F.normalize)
    return loss_of(logits)


def hook_on_several(model: Any) -> Any:
    logits = logits_of(model)
    register_multi_grad_hook([logits], lambda gradients: gradients[0].mul_(2))
    return loss_of(logits)


def hook_on_a_node(model: Any) -> Any:
    logits = logits_of(model)
    logits.grad_fn.register_hook(lambda inputs, outputs: doubled(inputs))
    return loss_of(logits)


def hook_before_a_node(model: Any) -> Any:
    logits = logits_of(model)
    logits.grad_fn.register_prehook(doubled)
    return loss_of(logits)


def hook_on_the_head(model: Any) -> Any:
    model.lm_head.register_full_backward_hook(lambda module, inputs, outputs: doubled(inputs))
    return loss_of(model(input_ids=IDS).logits)  # stock's logits, even of a patched model


def hook_before_the_head(model: Any) -> Any:
    model.lm_head.register_full_backward_pre_hook(lambda module, outputs: doubled(outputs))
    return loss_of(model(input_ids=IDS).logits)  # stock's logits, even of a patched model


def old_hook_on_the_head(model: Any) -> Any:
    model.lm_head.register_backward_hook(lambda module, inputs, outputs: doubled(inputs))
    return loss_of(logits_of(model))


def hook_after_a_copy(model: Any) -> Any:
    logits = logits_of(model)
    copied = logits * 2
    logits.register_hook(lambda gradient: gradient * 3)
    return loss_of(copied)


def hook_after_a_view(model: Any) -> Any:
    logits = logits_of(model)
    view = logits.view(-1, V)
    logits.register_hook(lambda gradient: gradient * 3)
    return loss_of(view.view(2, 9, V))


@named(
    hook_on_logits,
    hook_on_several,
    hook_on_a_node,
    hook_before_a_node,
    hook_on_the_head,
    hook_before_the_head,
    old_hook_on_the_head,
    hook_after_a_copy,
    hook_after_a_view,
)
@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_hooks_change_gradients(program: Program, models: tuple[Any, Any]) -> None:
    unchanged = outcome(models[0], lambda model: loss_of(logits_of(model)))[1]["model.embed_tokens.weight"]
    assert_same(models, program)
    assert unchanged is not None
    assert not torch.allclose(models[1].model.embed_tokens.weight.grad, unchanged)


def test_a_hook_after_the_loss_is_an_error(models: tuple[Any, Any]) -> None:
    hooks: list[Callable[[Any], Any]] = [
        lambda logits: logits.register_hook(F.normalize),
        lambda logits: register_multi_grad_hook([logits], print),
        lambda logits: logits.retain_grad(),
    ]
    for hook in hooks:
        logits = logits_of(models[1])
        loss_of(logits)
        with pytest.raises(RuntimeError, match="after the loss"):
            hook(logits)


def test_the_node_after_the_loss_is_a_warning(models: tuple[Any, Any]) -> None:
    logits = logits_of(models[1])
    loss_of(logits)
    with pytest.warns(MaterializedLogitsWarning, match="grad_fn after the loss"):
        assert logits.grad_fn is not None


# ------------------------------------------------------------------------------------ heads and autocast


def test_a_stack_of_heads_of_which_one_is_used(build: Build, fused_calls: Calls) -> None:
    """The gradients of the other are zeros."""
    stock = build("Llama", num_hidden_layers=1)
    stock.lm_head2 = nn.Linear(32, V)
    models = (stock.double(), patch_model(copy.deepcopy(stock), on_materialize="raise"))

    def loss_of_one(model: Any) -> Any:
        hidden = model.model(input_ids=IDS).last_hidden_state
        logits = [head(hidden) for head in (model.lm_head, model.lm_head2)]
        assert [is_lazy(each) for each in logits] == [model is models[1]] * 2
        return loss_of(torch.stack(logits, 1)[:, 0])

    assert_same(models, loss_of_one)
    assert len(fused_calls) == 1
    assert models[1].lm_head2.weight.grad.count_nonzero() == 0


def test_autocast_on_the_cpu(build: Build) -> None:
    stock = build("Llama", num_hidden_layers=1)
    models = (stock, patch_model(copy.deepcopy(stock)))

    def log_probabilities(model: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            logits = logits_of(model)
            values = F.log_softmax(logits, -1)
            wide = logits.float().log_softmax(-1)
            mean = (values.sum(-1) / V, wide.sum(-1) / V)
            return *mean, values.gather(-1, IDS[..., None]), wide.gather(-1, IDS[..., None])

    assert_same(models, log_probabilities, rtol=0.05, atol=0.05)  # and the dtypes exactly


# ------------------------------------------------------------------------------- other ways to the memory


def as_dlpack(model: Any) -> Any:
    return torch.utils.dlpack.from_dlpack(logits_of(model).detach())


def as_numpy_by_dlpack(model: Any) -> Any:
    return torch.tensor(np.from_dlpack(logits_of(model).detach()))


def as_numpy(model: Any) -> Any:
    return torch.tensor(np.asarray(logits_of(model).detach()))


def as_parameter(model: Any) -> Any:
    logits = logits_of(model)
    parameter = nn.Parameter(logits.detach())
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(parameter * 2).backward()
        optimizer.step()
    assert isinstance(parameter, nn.Parameter)
    return parameter.detach(), parameter.grad, logits * FIRST


class Sub(Tensor):
    """A class of the user."""


def as_subclass(model: Any) -> Any:
    other = logits_of(model).as_subclass(Sub)
    assert type(other) is Sub
    return loss_of(other).as_subclass(Tensor)


def swapped(model: Any) -> Any:
    logits, other = logits_of(model), torch.ones(1)
    torch.utils.swap_tensors(other, logits.detach())
    other.mul_(3.0)
    return loss_of(logits), other.sum()


def swapped_whole(model: Any) -> Any:
    logits, other = logits_of(model), torch.ones(2, 9, V, dtype=torch.float64)
    torch.utils.swap_tensors(other, logits)
    assert logits.sum() == logits.numel()
    return loss_of(other), other[0].square()


def exchanged(model: Any) -> Any:
    logits = logits_of(model)
    detached, view = logits.detach(), logits[0]
    logits.data = torch.ones_like(logits)
    return detached[0].square(), view.square(), loss_of(logits)


def copied(model: Any) -> Any:
    logits = logits_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.simplefilter("ignore", MaterializedLogitsWarning)
        other = copy.copy(logits)
    other.detach().mul_(2.0)
    return loss_of(other), logits.detach().sum()


@named(as_dlpack, as_numpy_by_dlpack, as_numpy, as_parameter, as_subclass, swapped, swapped_whole, exchanged, copied)
def test_other_owners(program: Program, models: tuple[Any, Any]) -> None:
    assert_same(models, program)


def test_a_capsule_is_an_error() -> None:
    """PyTorch asks nobody there; without memory to point to, it must not make a capsule."""
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
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("an error:"), done.stdout


# --------------------------------------------------------------------------------------------- torch.func

TWO = torch.tensor(2.0, dtype=torch.float64)


def gradient_of_a_temperature(model: Any) -> Any:
    logits = logits_of(model)
    return torch.func.grad(lambda t: loss_of(logits / t))(TWO)


def vmap_over_logits(model: Any) -> Any:
    return torch.func.vmap(lambda x: (x * x).sum(-1))(logits_of(model))


def vmap_beside_logits(model: Any) -> Any:
    logits = logits_of(model)
    return torch.func.vmap(lambda t: (logits.log_softmax(-1) * t).sum(-1))(torch.stack([TWO, TWO * 2]))


def jacobian_at_logits(model: Any) -> Any:
    return torch.func.jacrev(lambda x: x.logsumexp(-1))(logits_of(model)[0, :3])


@named(gradient_of_a_temperature, vmap_over_logits, vmap_beside_logits, jacobian_at_logits)
def test_transforms(program: Program, models: tuple[Any, Any]) -> None:
    assert_same(models, program)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_batched_gradients(reduction: str, models: tuple[Any, Any]) -> None:
    def batched(model: Any) -> Any:
        loss = F.cross_entropy(logits_of(model).flatten(0, 1), IDS.flatten(), reduction=reduction)
        outside = torch.linspace(-1, 1, 3 * loss.numel(), dtype=torch.float64).view(3, *loss.shape)
        return torch.autograd.grad(loss, list(model.parameters()), outside, is_grads_batched=True)

    assert_same(models, batched)


# ------------------------------------------------------------------------------------- forward-mode AD


def tangent_of_a_factor(model: Any) -> Any:
    logits = logits_of(model)
    return lambda dual: (logits * dual(TWO)).log_softmax(-1).gather(-1, IDS[..., None])


def tangent_of_a_bias(model: Any) -> Any:
    logits = logits_of(model)
    return lambda dual: loss_of(logits + dual(CLASS_WEIGHT))


def tangent_of_what_was_added(model: Any) -> Any:
    logits, bias = logits_of(model), CLASS_WEIGHT
    view = logits.view(-1, V)
    return lambda dual: logits.add_(dual(bias)).square().sum() + view.sum()


def tangent_of_logits(model: Any) -> Any:
    logits = logits_of(model)
    return lambda dual: dual(logits).sum()


def tangent_of_the_weight(model: Any) -> Any:
    def outputs(dual: Callable[[Tensor], Tensor]) -> Any:
        weights = {"lm_head.weight": dual(model.lm_head.weight)}
        return torch.func.functional_call(model, weights, (), {"input_ids": IDS, "labels": IDS}).loss

    return outputs


@named(tangent_of_a_factor, tangent_of_a_bias, tangent_of_what_was_added, tangent_of_logits, tangent_of_the_weight)
def test_forward_mode(program: Program, models: tuple[Any, Any]) -> None:
    def value_and_tangent(model: Any) -> Any:
        function = program(model)
        with forward_ad.dual_level():
            value, tangent = forward_ad.unpack_dual(
                function(lambda x: forward_ad.make_dual(x, torch.ones(x.shape).to(x)))
            )
            assert tangent is not None
            return value.detach(), tangent.detach().clone()

    assert_same(models, value_and_tangent)


# ------------------------------------------------------------------------------------- arguments and errors


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_a_mask_of_bytes(models: tuple[Any, Any]) -> None:
    assert_same(models, lambda model: logits_of(model)[MASK.byte()].square())


@pytest.mark.parametrize(
    "options",
    [
        {"ignore_index": np.int64(-100)},
        {"ignore_index": np.int64(IDS[0, 0].item())},
        {"ignore_index": IDS[0, 0]},
        {"label_smoothing": np.float32(0.1)},
        {"label_smoothing": False},
    ],
    ids=str,
)
def test_numbers_of_other_types(options: dict[str, Any], models: tuple[Any, Any]) -> None:
    assert_same(models, lambda model: F.cross_entropy(logits_of(model).flatten(0, 1), IDS.flatten(), **options))


def errors_of(models: tuple[Any, Any], program: Program) -> list[Exception]:
    errors = []
    for model in models:
        with pytest.raises(Exception) as raised:  # noqa: PT011  # compared by whoever asks
            program(logits_of(model))
        errors.append(raised.value)
    return errors


LIST: Any = [1.0] * V
WRONG: dict[str, Program] = {
    "list of weights": lambda logits: F.cross_entropy(logits.flatten(0, 1), IDS.flatten(), weight=LIST),
    "select": lambda logits: logits.select(1, 9),
    "transpose": lambda logits: logits.transpose(0, 3),
    "index": lambda logits: logits[:, 9],
    "narrow": lambda logits: logits.narrow(1, 5, 5),
    "cat": lambda logits: torch.cat([logits, logits[:1, :3]], dim=0),
    "add": lambda logits: logits + logits[:, :3],
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_of_the_same_kind(name: str, models: tuple[Any, Any]) -> None:
    stock, patched = errors_of(models, WRONG[name])
    assert type(patched) is type(stock)


WRONG_SIZES: dict[str, Program] = {
    "view": lambda logits: logits.view(7, V),
    "reshape": lambda logits: logits.reshape(-1, 5, V),
    "torch.reshape": lambda logits: torch.reshape(logits * 2, (17, V)),
    "view of a view": lambda logits: logits.flatten(0, 1).view(7, V),
    "mask": lambda logits: logits[torch.ones(2, 8, dtype=torch.bool)],
    "mask of tokens": lambda logits: logits[:, torch.ones(8, dtype=torch.bool)],
    "gather": lambda logits: logits.gather(-1, torch.full((2, 9, 1), V)),
    "gather of log-probabilities": lambda logits: logits.log_softmax(-1).gather(-1, torch.full((2, 9, 1), -1)),
    "split": lambda logits: logits.split([4, 4], 1),
    "squeeze": lambda logits: logits.squeeze(3),
    "movedim": lambda logits: logits.movedim((0, 1), (0, 3)),
}


@pytest.mark.parametrize("name", WRONG_SIZES)
def test_errors_tell_the_size_of_the_logits(name: str, models: tuple[Any, Any]) -> None:
    stock, patched = errors_of(models, WRONG_SIZES[name])
    assert (type(patched), str(patched)) == (type(stock), str(stock))


@pytest.mark.parametrize("function", [F.relu, F.silu, F.elu, F.leaky_relu])
def test_a_function_that_may_write(function: Any, models: tuple[Any, Any]) -> None:
    def program(model: Any) -> Any:
        logits = logits_of(model)
        written = function(logits[:, -1], inplace=True)
        return loss_of(logits), written.square().mean(), logits.sum()

    assert_same(models, program)


def test_pieces_of_nothing(models: tuple[Any, Any]) -> None:
    def program(model: Any) -> Any:
        logits = logits_of(model)
        assert list(logits[IDS < 0]) == []
        assert logits[:0].unbind(0) == ()
        return logits.movedim(0, 1).unbind(1)[1].square().sum(), loss_of(logits)

    assert_same(models, program)


def test_several_steps_detached_are_cat_without_logits(models: tuple[Any, Any]) -> None:
    """As evaluations gather them."""

    def program(model: Any) -> Tensor:
        steps = [model(input_ids=ids).logits.detach() for ids in (IDS, IDS.flip(0))]
        joined = torch.cat(steps)
        assert is_lazy(joined) == hasattr(model, "_flce")
        return joined.argmax(-1)

    assert_same(models, program)


# ------------------------------------------------------------------------------------------ other grad modes


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("whole", [True, False], ids=["logits", "a slice"])
def test_a_read_without_gradients_before_the_loss(mode: Any, whole: bool, models: tuple[Any, Any]) -> None:
    def read_first(model: Any) -> Any:
        logits = logits_of(model)
        with mode():
            read = logits if whole else logits[:, 2:4]
            values = (read * 2).exp().sum().item(), read.argmax(-1).tolist(), read.isnan().any().item()
        return loss_of(logits), logits.square().mean(), *values

    assert_same(models, read_first)


# ----------------------------------------------------------------------------------------------- as objects


def test_where_there_is_nothing_to_do(models: tuple[Any, Any]) -> None:
    """Stock returns the object itself: a hook on it is one on the logits."""

    def hook_on_flat_logits(model: Any) -> Any:
        logits = logits_of(model).view(-1, V)
        copied = logits * 2
        flat = logits.flatten(0, -2)
        assert flat is logits
        flat.register_hook(lambda gradient: gradient * 3)
        return copied.square()

    assert_same(models, hook_on_flat_logits)


def test_the_hash_is_stable(models: tuple[Any, Any]) -> None:
    logits = logits_of(models[1])
    before, names = hash(logits), {logits: "logits"}
    logits.mul_(2.0)
    assert hash(logits) == before
    logits.isnan()
    logits.exp_()
    assert logits.is_materialized
    assert hash(logits) == before
    assert names[logits] == "logits"


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "logits": lambda x: x,
    "transposed": lambda x: x.transpose(1, 2),
    "transposed product": lambda x: x.transpose(1, 2) * 2,
    "transposed clone": lambda x: x.transpose(0, 1).clone(),
    "transposed and copied": lambda x: x.transpose(1, 2).contiguous(),
    "permuted": lambda x: x.permute(2, 0, 1),
    "slice": lambda x: x[:, 1:-1],
    "slice of transposed": lambda x: x.transpose(0, 1)[1:],
    "slice that is cast": lambda x: x[:, 1:].float(),
    "row": lambda x: x[0],
    "new axis": lambda x: x.unsqueeze(1).transpose(1, 3),
    "log_softmax of transposed": lambda x: x.transpose(1, 2).log_softmax(1),
    "tanh of transposed": lambda x: torch.tanh(x.mT),
    "one class of each, class second": lambda x: x.mT.gather(1, IDS[:, None]),
    "two classes of each, class second": lambda x: x.mT.gather(1, torch.stack([IDS, IDS], 1)),
}


@pytest.mark.parametrize("read", [False, True], ids=["not read", "read"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_strides_are_those_of_stock(name: str, read: bool, models: tuple[Any, Any]) -> None:
    def layout(model: Any) -> Any:
        x = LAYOUTS[name](logits_of(model))
        if read:
            x.isnan()
        strides = tuple(x.stride(dim) for dim in range(x.dim()))
        return x.is_contiguous(), *x.stride(), *strides, x.storage_offset(), x.data_ptr() > 0, *x.stride()

    assert_same(models, layout)
