"""Tables of the functions of PyTorch: the operation of each on lazy logits, and sets of functions of one kind.

`dispatch` and `tensor` read these tables.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flce.functional import cross_entropy
from flce.huggingface.lazy import divergences, elementwise, indexing, values
from flce.huggingface.lazy.state import LazyState


def torch_functions(names: str) -> list[Callable[..., Any]]:
    """Return the functions, methods and getters of PyTorch with these names, as in ``__torch_function__``."""
    members = [getattr(Tensor, name, None) for name in names.split()]
    plain = [name for name in names.split() if not name.startswith("__")]  # `__eq__` of a module is Python's
    members += [getattr(namespace, name, None) for name in plain for namespace in (torch, F, torch.special)]
    members = [member if callable(member) else getattr(member, "__get__", None) for member in members]
    return [member for member in members if member is not None and not isinstance(member, type)]


class Operation(NamedTuple):
    """The operation of one function of PyTorch on lazy logits.

    Attributes:
        run: the operation: a function of the state and the other arguments.
        used_by: an architecture of Transformers, or a library, that needs the operation.
        kind: ``"new"``: the result has separate memory. ``"elementwise"``: the result has separate memory and the
            strides of the logits. ``"view"``: the result shares the memory of the logits, so that a write to one is
            visible in the other. ``"in place"``: the result replaces the state of the logits. ``"of views"``: the first
            argument is a list of logits that share their memory; the result has separate memory.
    """

    run: Callable[..., Any]
    used_by: str
    kind: Literal["new", "elementwise", "view", "in place", "of views"] = "new"


_cast, _reshape = elementwise.to_dtype, indexing.reshape
# Functions that are not in this table compute the real logits: a warning is better than a wrong result.
_TABLE: dict[str, Operation] = {
    "view reshape": Operation(
        partial(_reshape, method=Tensor.reshape), "Transformers: its loss of causal models", "view"
    ),
    "flatten": Operation(partial(_reshape, method=Tensor.flatten), "training loops: tokens as rows", "view"),
    "squeeze": Operation(partial(_reshape, method=Tensor.squeeze), "verl: sequences without padding", "view"),
    "unsqueeze": Operation(partial(_reshape, method=Tensor.unsqueeze), "verl: sequences without padding", "view"),
    "transpose": Operation(indexing.transpose, "ProphetNet; loops whose loss has the classes in dimension 1", "view"),
    "split": Operation(indexing.split, "TRL: entropies, one chunk after the other", "view"),
    "chunk": Operation(indexing.chunk, "Axolotl: a loss in chunks", "view"),
    "unbind": Operation(indexing.unbind, "TRL: a loop over sequences", "view"),
    "__getitem__": Operation(indexing.getitem, "Transformers: shifted logits, logits_to_keep", "view"),
    "cat concat concatenate": Operation(indexing.cat, "Dream; Axolotl: diffusion", "of views"),
    "roll": Operation(indexing.roll, "Axolotl: diffusion"),
    "index_select": Operation(indexing.index_select, "policy losses of packed sequences"),
    "detach data": Operation(LazyState.detach, "Trainer: outputs of a step", "view"),
    "contiguous": Operation(elementwise.contiguous, "Transformers: shifted logits"),
    "clone": Operation(elementwise.clone, "DDP: outputs", "elementwise"),
    "to": Operation(elementwise.to, "Accelerate: outputs of a model on several devices", "elementwise"),
    "cpu": Operation(lambda state: elementwise.to(state, "cpu"), "Trainer: outputs of an evaluation", "elementwise"),
    "float": Operation(partial(_cast, dtype=torch.float32), "Transformers: its loss of causal models", "elementwise"),
    "double": Operation(partial(_cast, dtype=torch.float64), "a cast, as float", "elementwise"),
    "half": Operation(partial(_cast, dtype=torch.float16), "a cast, as float", "elementwise"),
    "bfloat16": Operation(partial(_cast, dtype=torch.bfloat16), "a cast, as float", "elementwise"),
    "mul multiply __mul__ __rmul__": Operation(elementwise.multiply, "Cohere; TRL; distillation", "elementwise"),
    "div divide true_divide __truediv__": Operation(elementwise.divide, "Granite; prime-rl", "elementwise"),
    "add __add__ __radd__": Operation(elementwise.add, "BART: a bias; PEFT: an adapter", "elementwise"),
    "sub subtract __sub__": Operation(elementwise.subtract, "torch.distributions.Categorical", "elementwise"),
    "neg negative __neg__": Operation(
        lambda state: state.with_op("mul", -1), "Trainer: label smoothing", "elementwise"
    ),
    "tanh": Operation(lambda state: state.with_op("tanh"), "Gemma 2", "elementwise"),
    "log_softmax": Operation(partial(elementwise.softmax, name="log_softmax"), "TRL"),
    "softmax": Operation(partial(elementwise.softmax, name="softmax"), "OpenRLHF: entropies"),
    "exp": Operation(elementwise.exp, "TRL: entropies", "elementwise"),
    "clamp": Operation(elementwise.clamp, "torch.distributions.Categorical", "elementwise"),
    "__eq__ eq": Operation(values.equals_itself, "torch.distributions.Categorical"),
    "argmax": Operation(values.argmax, "TRL: accuracy of tokens"),
    "logsumexp": Operation(values.logsumexp, "TRL; OpenRLHF"),
    "gather": Operation(values.gather, "TRL; verl; OpenRLHF"),
    "take_along_dim": Operation(lambda state, indices, dim=None: values.gather(state, dim, indices), "losses of GRPO"),
    "mean": Operation(partial(values.reduction, is_mean=True), "TRL: metrics of ORPO and CPO; smoothing by hand"),
    "sum": Operation(partial(values.reduction, is_mean=False), "Trainer: label smoothing; TRL: entropies"),
    "cross_entropy": Operation(values.cross_entropy, "Transformers: its loss of causal models; distillation"),
    "kl_div": Operation(divergences.kl_div, "TRL; Transformers: its guide to distillation"),
    "nll_loss": Operation(values.nll_loss, "ProphetNet"),
    "detach_": Operation(LazyState.detach, "training loops: outputs of a step", "in place"),
    "mul_ multiply_ __imul__": Operation(elementwise.multiply, "PEFT", "in place"),
    "div_ divide_ true_divide_ __itruediv__": Operation(
        elementwise.divide, "verl; OpenRLHF: a temperature", "in place"
    ),
    "add_ __iadd__": Operation(elementwise.add, "PEFT: an adapter; MobileBERT: a bias", "in place"),
}

OPERATIONS = {function: operation for names, operation in _TABLE.items() for function in torch_functions(names)}

OPERATIONS[cross_entropy] = Operation(values.flce_cross_entropy, "flce.cross_entropy")

# Operations on a state with a teacher. Operations on the dimensions of tokens or classes would have to change both.
OF_DIFFERENCES = frozenset(torch_functions("mul multiply __mul__ __rmul__ neg negative __neg__ sum float to"))

COMMUTATIVE = frozenset(torch_functions("mul multiply __mul__ add __add__"))

# Within a graph, `logits - tensor` calls `__rsub__` with the tensor first. The keys are names, because the compiler
# cannot compare these functions.
REFLECTED: dict[str, Callable[..., Any]] = {"__rsub__": Tensor.__sub__, "__rdiv__": Tensor.__truediv__}

# Functions that read metadata, which lazy logits have without real logits.
METADATA = frozenset(
    torch_functions("""
    shape dtype device layout ndim requires_grad is_leaf grad names itemsize nbytes
    is_cpu is_cuda is_mps is_xpu is_meta is_sparse is_sparse_csr is_quantized is_nested is_mkldnn is_xla
    is_ipu is_maia is_vulkan size dim ndimension numel nelement stride storage_offset is_contiguous
    element_size is_floating_point is_complex is_signed is_inference get_device __len__ _version
    is_same_size is_conj is_neg is_shared _base _is_view retains_grad
    """)
)

# Functions that need the node of the logits in the autograd graph.
GRAPH_ACCESS = frozenset(torch_functions("grad_fn register_hook retain_grad register_post_accumulate_grad_hook"))

# Functions that read only the shape, dtype or device of one argument, with the position of this argument.
READS_METADATA = {
    **dict.fromkeys(torch_functions("empty_like zeros_like ones_like full_like rand_like randn_like randint_like"), 0),
    **dict.fromkeys(torch_functions("new_empty new_zeros new_ones new_full new_tensor"), 0),
    **dict.fromkeys(torch_functions("to type_as view_as expand_as reshape_as"), 1),
}

# Functions for which only the values of a small view are computed, not all logits. They do not change their arguments,
# return separate memory, and do not need a node in the graph. PyTorch's schemas do not state this for all of them.
READ_ONLY = frozenset(
    torch_functions("""
    topk max min amax amin argmax argmin sort argsort softmax log_softmax logsumexp exp sigmoid multinomial sum mean std
    var norm cumsum abs square isnan isfinite isinf any all eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__
    allclose isclose where gather masked_select cat stack cross_entropy nll_loss kl_div mse_loss add sub mul div clone
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __neg__ __bool__ __int__ __float__ item tolist
    """)
)
