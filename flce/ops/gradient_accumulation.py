"""Gradients of parameters to which backward adds dW (`ChunkOptions.gradient_accumulation_fusion`): the `main_grad` that
Megatron-Core gives its parameters, or else `.grad`. In a graph of a compiler, autograd adds dW."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce.core import private
from flce.core.problem import LinearCrossEntropyProblem
from flce.ops.arguments import PLAIN_TENSORS

# Nodes of autograd that return their upstream gradient, perhaps in another dtype.
_IDENTITIES = ("ViewBackward0", "AliasBackward0", "ToCopyBackward0")


def check_parameters(weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError for a weight, with the name of its argument, to whose gradient dW cannot be added, or if other
    code may need the gradient of each step."""
    processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    for name, weight in weights:
        if not (weight.requires_grad and torch.is_grad_enabled()):
            continue
        node = _find_node(weight)
        parameter = getattr(node, "variable", None)
        has_main_grad = getattr(parameter, "main_grad", None) is not None
        if parameter is None or parameter.shape != weight.shape:
            reason = f"a parameter, got the result of {node.name()}"
        elif hasattr(parameter, "ds_id") or hasattr(parameter, "__fsdp_param__"):
            reason = "a parameter that FSDP and ZeRO do not divide"
        elif not has_main_grad and processes > 1:
            reason = f"a main_grad, or one process: hooks may sum gradients of the {processes} processes"
        elif not has_main_grad and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
            reason = "a main_grad, or no hooks of the gradient (register_hook, register_post_accumulate_grad_hook)"
        else:
            continue
        raise ValueError(
            f"options.gradient_accumulation_fusion adds dW to the gradient of {name}, which needs {reason}"
        )


def _find_node(weight: Tensor) -> Any:
    """Return the node that adds to the gradient of a parameter, of which the weight is a view or a cast, or another
    node of autograd."""
    node: Any = torch.autograd.graph.get_gradient_edge(weight).node
    while node.name() in _IDENTITIES:
        node = node.next_functions[0][0]
    return node


def find_targets(p: LinearCrossEntropyProblem) -> LinearCrossEntropyProblem:
    """Return the problem with the gradients to which this backward pass adds dW: none in `torch.autograd.grad`, or in a
    backward pass for other inputs."""
    targets, has_targets = {}, p.options.gradient_accumulation_fusion and not p.is_traced
    for k, needed in enumerate(p.needs.weights if has_targets else ()):
        node = _find_node(p.terms[k].weight) if needed else None
        parameter: Any = getattr(node, "variable", None)
        if type(parameter) in PLAIN_TENSORS and _is_executed(node):
            with torch.enable_grad():
                check_parameters([("the weight", p.terms[k].weight)])  # Hooks may be newer than the call.
            main_grad = getattr(parameter, "main_grad", None)
            targets[k] = parameter.grad if main_grad is None else main_grad
    targets = {k: target for k, target in targets.items() if target is not None}
    return replace(p, dw_targets=targets) if targets else p


def _is_executed(node: Any) -> bool:
    try:
        return bool(private.will_execute(node))
    except RuntimeError:  # `torch.autograd.grad` returns the gradient of this parameter.
        return False


def replace_added(gradients: Sequence[Tensor], p: LinearCrossEntropyProblem) -> list[Any]:
    """Return gradients with the gradients that autograd gets instead of the `dw_targets`: as from the linear layers of
    Megatron-Core, whose hooks need a `.grad` and discard it, unless `zero_out_wgrad` is set."""
    replaced: dict[int, Tensor | None] = {}
    for k, target in p.dw_targets.items():
        parameter, replaced[id(target)] = _find_node(p.terms[k].weight).variable, None
        if target is not parameter.grad and hasattr(parameter, "grad_added_to_main_grad"):
            parameter.grad_added_to_main_grad = True
            new = torch.zeros_like if getattr(parameter, "zero_out_wgrad", False) else torch.empty_like
            replaced[id(target)] = new(parameter, requires_grad=False)
    return [replaced.get(id(gradient), gradient) for gradient in gradients]
