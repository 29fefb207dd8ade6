"""A plugin of verl: `flce.linear_logprobs` in the place of its Triton kernel of log-probabilities and entropies.

The options that choose that kernel, and import this file in each worker:

    actor_rollout_ref.model.use_fused_kernels=True
    actor_rollout_ref.model.fused_kernel_options.impl_backend=triton
    actor_rollout_ref.model.external_lib=verl_plugin

The file installs itself when it is imported. verl's models of Transformers look the kernel up at each forward, so it
does not matter whether they were made before.
"""

from __future__ import annotations

import importlib
import inspect
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
        weight: (V, H) weight of the head.
        labels: as many class indices as there are hidden states, each at the place of the one that predicts it.
        temperature: divides the logits.
        reduction: "none", "sum" or "mean" of the log-probabilities; the entropies are those of the tokens in any case.
        dist_process_group: None.

    Returns:
        Log-probabilities, (N,) or (), and entropies, (N,), of all N tokens in one dimension; float32 (float64 for
        float64 inputs).

    Raises:
        NotImplementedError: `dist_process_group` is given, that is, the vocabulary is split over processes.
        ValueError: `reduction` is another.
    """
    if dist_process_group is not None:
        raise NotImplementedError(
            f"dist_process_group is {dist_process_group}: flce has no log-probabilities of a vocabulary that is split "
            "over processes. With verl's Megatron engine leave verl_plugin out"
        )
    if reduction.lower() not in REDUCTIONS:
        raise ValueError(f"reduction must be 'none', 'sum' or 'mean', got {reduction!r}")
    tokens = hidden.reshape(-1, hidden.shape[-1])
    out: Any = flce.linear_logprobs(tokens, weight, labels.reshape(-1), temperature=temperature)
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
    kernel().linear_cross_entropy = linear_cross_entropy


def uninstall() -> None:
    """Puts verl's own back. Without ours there it changes nothing."""
    module = kernel()
    module.linear_cross_entropy = module.LinearCrossEntropy.apply


install()
