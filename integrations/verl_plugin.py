"""A plugin of verl: `flce.linear_logprobs` in the place of its Triton kernel of log-probabilities and entropies.

The options that choose that kernel, and import this file in each worker:

    actor_rollout_ref.model.use_fused_kernels=True
    actor_rollout_ref.model.fused_kernel_options.impl_backend=triton
    actor_rollout_ref.model.external_lib=verl_plugin

The file installs itself when it is imported. verl's models of Transformers look the kernel up at each forward, so it
does not matter whether they were made before. Those of Megatron-Core look it up once, and are given it too.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

import flce

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda x: x, "sum": Tensor.sum, "mean": Tensor.mean}


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """verl's function of this name: log-probabilities of the labels, and entropies.

    Args:
        hidden: (..., H) hidden states.
        weight: (V, H) weight of the head; with `dist_process_group` the slice of this process, (V / processes, H).
        labels: as many class indices of the whole head as there are hidden states, each at the place of the one that
            predicts it.
        temperature: divides the logits.
        reduction: "none", "sum" or "mean" of the log-probabilities; the entropies are those of the tokens in any case.
        dist_process_group: whose processes have the same hidden states and slices of one size, in the order of their
            ranks. Their gradients of `hidden` are shares that the caller sums over the processes, as Megatron-Core's
            gather of a sequence does in its backward, and as those of verl's kernel are.

    Returns:
        Log-probabilities, (N,) or (), and entropies, (N,), of all N tokens in one dimension; float32 (float64 for
        float64 inputs).

    Raises:
        TypeError: `dist_process_group` is no group.
        ValueError: `reduction` is another.
    """
    if reduction.lower() not in REDUCTIONS:
        raise ValueError(f"reduction must be 'none', 'sum' or 'mean', got {reduction!r}")
    tokens = hidden.reshape(-1, hidden.shape[-1])
    group = dist_process_group
    if group is not None and tokens.requires_grad:
        tokens = tokens.view_as(tokens)  # which has a hook of its own
        tokens.register_hook(lambda grad: grad / group.size())  # flce has summed it, and the caller will
    labels = labels.reshape(-1)
    out: Any = flce.linear_logprobs(tokens, weight, labels, temperature=temperature, process_group=group)
    return REDUCTIONS[reduction.lower()](out.logprob), out.entropy


def described(function: Callable[..., Any]) -> str:
    """The names and defaults of its arguments, without that of autograd's context."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "ctx"]
    return ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)


def kernel() -> Any:
    """verl's module of it.

    Raises:
        ImportError: verl cannot be imported, or its function takes other arguments than ours.
    """
    module: Any = importlib.import_module("verl.utils.kernel.linear_cross_entropy")
    function = getattr(module, "LinearCrossEntropy", None)
    theirs = "no LinearCrossEntropy" if function is None else f"linear_cross_entropy({described(function.forward)})"
    ours = f"linear_cross_entropy({described(linear_cross_entropy)})"
    if theirs != ours:
        raise ImportError(f"verl has {theirs} where flce was to put {ours}: it knows the function of verl 0.9.1")
    return module


def install() -> None:
    """Puts ours in its place, in this process. A second time changes nothing."""
    _put(kernel(), linear_cross_entropy)


def uninstall() -> None:
    """Puts verl's own back. Without ours there it changes nothing."""
    module = kernel()
    _put(module, module.LinearCrossEntropy.apply)


def _put(module: Any, function: Callable[..., Any]) -> None:
    # Which has looked it up when it was imported.
    of_megatron: Any = sys.modules.get("verl.models.mcore.model_forward_fused")
    for holder in filter(None, (module, of_megatron)):
        holder.linear_cross_entropy = function


install()
