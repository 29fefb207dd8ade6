"""Plugin of verl: `flce.linear_logprobs` instead of verl's Triton kernel of log-probabilities and entropies.

These options select the kernel and import this file in each worker:

    actor_rollout_ref.model.use_fused_kernels=True
    actor_rollout_ref.model.fused_kernel_options.impl_backend=triton
    actor_rollout_ref.model.external_lib=verl_plugin

The import of this file installs the function. verl's models of Transformers look the kernel up in each forward pass,
so they may be created before the import. Models of Megatron-Core look it up once, at the import of their module. The
plugin replaces the function in that module too.
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
    """Return the log-probabilities of the labels, and entropies, like verl's function of this name.

    Args:
        hidden: (..., H) hidden states.
        weight: (V, H) weight of the head; with `dist_process_group` the shard of this process, (V / processes, H).
        labels: class indices of the full head, one for each hidden state: the class that the hidden state predicts.
        temperature: divides the logits.
        reduction: "none", "sum" or "mean" of the log-probabilities. Entropies are not reduced.
        dist_process_group: processes with the same hidden states and shards of equal size, in the order of ranks. As
            with verl's kernel, the caller has to sum the gradients of `hidden` over the processes. Megatron-Core does
            so in the backward pass of its gather of a sequence.

    Returns:
        Log-probabilities (N,) or (), and entropies (N,), of all N tokens in one dimension; float32 (float64 for
        float64 inputs).

    Raises:
        TypeError: `dist_process_group` is not a process group.
        ValueError: `reduction` is not "none", "sum" or "mean".
    """
    if reduction.lower() not in REDUCTIONS:
        raise ValueError(f"reduction must be 'none', 'sum' or 'mean', got {reduction!r}")
    tokens = hidden.reshape(-1, hidden.shape[-1])
    group = dist_process_group
    if group is not None and tokens.requires_grad:
        tokens = tokens.view_as(tokens)  # a view, so that the hook is not on the caller's tensor
        tokens.register_hook(lambda grad: grad / group.size())  # flce has summed the gradient; the caller sums it again
    labels = labels.reshape(-1)
    out: Any = flce.linear_logprobs(tokens, weight, labels, temperature=temperature, process_group=group)
    return REDUCTIONS[reduction.lower()](out.logprob), out.entropy


def signature_text(function: Callable[..., Any]) -> str:
    """Return the names and defaults of a function's arguments, without autograd's `ctx`."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "ctx"]
    return ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)


def kernel_module() -> Any:
    """Return verl's module of the kernel.

    Raises:
        ImportError: verl cannot be imported, or its function has other arguments than `linear_cross_entropy`.
    """
    module: Any = importlib.import_module("verl.utils.kernel.linear_cross_entropy")
    function = getattr(module, "LinearCrossEntropy", None)
    name, found = "linear_cross_entropy", "no LinearCrossEntropy"
    if function is not None:
        found = f"{name}({signature_text(function.forward)})"
    expected = f"{name}({signature_text(linear_cross_entropy)})"
    if found != expected:
        raise ImportError(f"verl has {found}, expected {expected}: install verl 0.9.1")
    return module


def install() -> None:
    """Replace verl's function by flce in this process. A second call has no effect."""
    _set_function(kernel_module(), linear_cross_entropy)


def uninstall() -> None:
    """Restore verl's function. Without an installed function of flce the call has no effect."""
    module = kernel_module()
    _set_function(module, module.LinearCrossEntropy.apply)


def _set_function(module: Any, function: Callable[..., Any]) -> None:
    # Megatron's module has looked up the function at its import.
    megatron_module: Any = sys.modules.get("verl.models.mcore.model_forward_fused")
    for holder in filter(None, (module, megatron_module)):
        holder.linear_cross_entropy = function


install()
