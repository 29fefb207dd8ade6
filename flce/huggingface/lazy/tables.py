"""Which function of PyTorch does what to lazy logits: one line an operation, and sets of functions of one kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flce.functional import cross_entropy
from flce.huggingface.lazy import elementwise, indexing, values
from flce.huggingface.lazy.state import LazyState


def functions(names: str) -> list[Callable[..., Any]]:
    """The functions, methods and getters of PyTorch with these names, as ``__torch_function__`` is given them."""
    found = [getattr(Tensor, name, None) for name in names.split()]
    plain = [name for name in names.split() if not name.startswith("__")]  # Python gives modules the others, too
    found += [getattr(home, name, None) for name in plain for home in (torch, F, torch.special)]
    found = [member if callable(member) else getattr(member, "__get__", None) for member in found]
    return [member for member in found if member is not None and not isinstance(member, type)]


class Operation(NamedTuple):
    """What one function of PyTorch does to lazy logits.

    Attributes:
        run: takes the state and the function's other arguments.
        kind: ``"new"``: the result has memory of its own. ``"elementwise"``: and the strides of the logits. ``"view"``:
            it shares the logits' memory, so that a write to one shows in the other. ``"in place"``: the result is what
            the logits become.
    """

    run: Callable[..., Any]
    kind: Literal["new", "elementwise", "view", "in place"] = "new"


_TABLE: dict[str, Operation] = {
    "view reshape": Operation(indexing.reshape, "view"),
    "flatten": Operation(indexing.resized(Tensor.flatten), "view"),
    "squeeze": Operation(indexing.resized(Tensor.squeeze), "view"),
    "unsqueeze": Operation(indexing.resized(Tensor.unsqueeze), "view"),
    "transpose": Operation(indexing.transpose, "view"),
    "split": Operation(indexing.split, "view"),
    "chunk": Operation(indexing.chunk, "view"),
    "unbind": Operation(indexing.unbind, "view"),
    "__getitem__": Operation(indexing.getitem, "view"),
    "index_select": Operation(indexing.index_select),
    "detach data": Operation(LazyState.detach, "view"),
    "contiguous": Operation(elementwise.contiguous),
    "clone": Operation(elementwise.clone, "elementwise"),
    "to": Operation(elementwise.to, "elementwise"),
    "cpu": Operation(lambda state: elementwise.to(state, "cpu"), "elementwise"),
    "type": Operation(elementwise.to_dtype, "elementwise"),
    "type_as": Operation(lambda state, other: elementwise.to(state, other=other), "elementwise"),
    "float": Operation(elementwise.cast(torch.float32), "elementwise"),
    "double": Operation(elementwise.cast(torch.float64), "elementwise"),
    "half": Operation(elementwise.cast(torch.float16), "elementwise"),
    "bfloat16": Operation(elementwise.cast(torch.bfloat16), "elementwise"),
    "mul multiply __mul__ __rmul__": Operation(elementwise.times, "elementwise"),
    "div divide true_divide __truediv__": Operation(elementwise.divide, "elementwise"),
    "add __add__ __radd__": Operation(elementwise.add, "elementwise"),
    "sub subtract __sub__": Operation(elementwise.subtract, "elementwise"),
    "neg negative __neg__": Operation(elementwise.recorded("mul", -1), "elementwise"),
    "tanh": Operation(elementwise.recorded("tanh"), "elementwise"),
    "log_softmax": Operation(elementwise.normalised("log_softmax")),
    "softmax": Operation(elementwise.normalised("softmax")),
    "exp": Operation(elementwise.exp, "elementwise"),
    "clamp": Operation(elementwise.clamp, "elementwise"),
    "__eq__ eq": Operation(values.equals_itself),
    "argmax": Operation(values.argmax),
    "logsumexp": Operation(values.logsumexp),
    "gather": Operation(values.gather),
    "sum": Operation(values.total),
    "cross_entropy": Operation(values.cross_entropy),
    "nll_loss": Operation(values.nll_loss),
    "mul_ multiply_ __imul__": Operation(elementwise.times, "in place"),
    "div_ divide_ true_divide_ __itruediv__": Operation(elementwise.divide, "in place"),
    "add_ __iadd__": Operation(elementwise.add, "in place"),
    "tanh_": Operation(elementwise.recorded("tanh"), "in place"),
}

OPERATIONS = {function: operation for names, operation in _TABLE.items() for function in functions(names)}

OPERATIONS[cross_entropy] = Operation(values.own_cross_entropy)

# Give views of their arguments that have one shape.
BROADCAST = frozenset(functions("broadcast_tensors"))

COMMUTES = frozenset(functions("mul multiply __mul__ add __add__"))

# What the compiler takes `logits - tensor` for, with the tensor first. It cannot compare these functions.
REFLECTED: dict[str, Callable[..., Any]] = {"__rsub__": Tensor.__sub__, "__rdiv__": Tensor.__truediv__}

# Answered by lazy logits themselves, which know their shape, dtype and device.
METADATA = frozenset(
    functions("""
    shape dtype device layout ndim requires_grad is_leaf grad names itemsize nbytes
    is_cpu is_cuda is_mps is_xpu is_meta is_sparse is_sparse_csr is_quantized is_nested is_mkldnn is_xla
    is_ipu is_maia is_vulkan size dim ndimension numel nelement stride storage_offset is_contiguous
    element_size is_floating_point is_complex is_signed is_inference get_device __len__ _version
    is_same_size is_conj is_neg is_shared _base _is_view retains_grad
    """)
)

# Ask for the logits' place in the autograd graph.
GRAPH = frozenset(functions("grad_fn register_hook retain_grad register_post_accumulate_grad_hook"))

# Make a new tensor of their first argument's shape, dtype or device, without reading it.
LIKE = frozenset(functions("empty_like zeros_like ones_like full_like rand_like randn_like randint_like"))

NEW = frozenset(functions("new_empty new_zeros new_ones new_full new_tensor"))

# Read no more than the shape, dtype or device of their second argument.
AS = frozenset(functions("to type_as view_as expand_as reshape_as"))

# Do not change their arguments, make memory of their own, do not ask for their place in the graph.
# Schemas do not tell: those of dropout, atleast_1d, einsum and broadcast_tensors promise memory of their own, and each
# may return its argument or a view of it.
READING = frozenset(
    function
    for function in functions("""
    all any amin amax aminmax argmin argmax max min sum nansum mean nanmean std var std_mean var_mean median nanmedian
    mode prod norm quantile nanquantile logsumexp cumsum cumprod logcumsumexp topk sort argsort kthvalue count_nonzero
    nonzero unique histc bincount multinomial bernoulli softmax log_softmax softmin sigmoid logsigmoid exp exp2 expm1
    log log2 log10 log1p sqrt rsqrt square abs absolute sign reciprocal pow float_power clamp clip clamp_min clamp_max
    nan_to_num round floor ceil tanh sin cos relu gelu silu softplus elu neg negative isnan isfinite isinf isposinf
    isneginf eq equal ne not_equal lt less le less_equal gt greater ge greater_equal allclose isclose maximum minimum
    fmax fmin where masked_fill masked_select index_select gather take_along_dim add sub subtract mul multiply div
    divide true_divide rsub remainder fmod lerp addcmul addcdiv outer dot mv mm bmm matmul linear cat concat
    concatenate stack hstack vstack clone diff dist cdist cosine_similarity normalize layer_norm gumbel_softmax
    cross_entropy nll_loss kl_div mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits
    margin_ranking_loss __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__
    __floordiv__ __mod__ __pow__ __rpow__ __neg__ __abs__ __matmul__ __rmatmul__ __invert__ __eq__ __ne__ __lt__
    __le__ __gt__ __ge__ __contains__ __bool__ __int__ __float__ __index__ __format__ __repr__ item tolist scatter
    scatter_add index_fill repeat repeat_interleave tile roll flip inner addmm baddbmm logaddexp xlogy expit entr
    logical_not bucketize isin msort soft_margin_loss poisson_nll_loss gaussian_nll_loss multi_margin_loss
    hinge_embedding_loss triplet_margin_loss dstack column_stack int long bool leaky_relu
    """)
    if "inplace" not in getattr(getattr(function, "__code__", None), "co_varnames", ())
)
