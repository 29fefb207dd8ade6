"""Search for the heads of a model: the linear layers that compute logits of the vocabulary. ``patch.py`` calls it.

A language model is a module with ``get_output_embeddings()``, which returns the output embedding. The heads are the
linear layers in the output embedding with V outputs. There may be several: adapters (LoRA, copies to be trained) wrap
the original layer and add layers to it. Heads may also be next to the output embedding, as in Medusa.

Some models compute their logits in another layer or in no layer, by a vocabulary product: a matrix product with V
outputs. `ProductMode` finds the vocabulary products in a call of the model.
"""

from __future__ import annotations

import functools
import inspect
import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flce.ops.arguments import is_quantised
from flce.torch_ops import skip_frame_and_callees


def find_language_models(module: Any, name: str = "") -> tuple[list[Any], dict[str, str]]:
    """Return the outermost language models that can be patched, and for each other one the reason by its name."""
    has_embedding = hasattr(type(module), "get_output_embeddings")
    reason = _reason_not_patchable(module) if has_embedding else None
    if has_embedding and reason is None:
        return [module], {}
    models: list[Any] = []
    unpatchable: dict[str, str] = {}
    for child_name, child in module.named_children():
        child_models, child_unpatchable = find_language_models(child, f"{name}.{child_name}".lstrip("."))
        models += child_models
        unpatchable |= child_unpatchable
    if reason is not None and (not models or module.get_output_embeddings() is not None):
        unpatchable = {name: reason}
    return models, unpatchable


def modules_except(module: Any, others: Sequence[nn.Module] = ()) -> list[nn.Module]:
    """Return ``module`` and its submodules, except ``others`` and their submodules. Empty if it is not a module."""
    modules: list[nn.Module] = []
    stack, seen = [module] if isinstance(module, nn.Module) else [], {id(other) for other in others}
    while stack:  # faster than generators: each call of a patched model runs this loop
        module = stack.pop()
        if id(module) not in seen:
            seen.add(id(module))
            modules.append(module)
            stack += [child for child in reversed(module._modules.values()) if child is not None]
    return modules


def backbone(model: Any) -> nn.Module:
    """Return the model below the head (``base_model``), or ``model`` if it has none."""
    below = getattr(model, "base_model", model)
    return below if isinstance(below, nn.Module) else model


def find_heads(model: Any, others: Iterable[nn.Module] = ()) -> list[nn.Linear]:
    """Return the heads in the output embedding, and layers with V outputs in ``others`` or outside of the backbone."""
    layers, below = embedding_layers(model), backbone(model)
    if not layers:
        return []
    candidates: Iterable[nn.Module] = modules_except(model, [below])
    if below is model:  # the backbone is unknown: accept only children of the same shape as the head
        candidates = (m for m in model.children() if getattr(m, "in_features", None) == layers[0].in_features)
    return layers + _vocabulary_layers([*candidates, *others], vocabulary_sizes(model))


def embedding_layers(model: Any) -> list[nn.Linear]:
    """Return the linear layers in the output embedding that compute logits, possibly none."""
    return _vocabulary_layers(modules_except(model.get_output_embeddings()), vocabulary_sizes(model))


def _vocabulary_layers(modules: Iterable[nn.Module], sizes: frozenset[int]) -> list[nn.Linear]:
    """Return the patchable linear layers among ``modules`` whose number of outputs is in ``sizes``."""
    return [m for m in modules if isinstance(m, nn.Linear) and m.out_features in sizes and _is_patchable_linear(m)]


class HeadModules:
    """The modules in a model's output embedding, with the heads among them, at the time of a search for heads."""

    def __init__(self, embedding: Any, heads: Sequence[nn.Linear]) -> None:
        head_ids = {id(head) for head in heads}
        modules = modules_except(embedding)
        self._modules = [(weakref.ref(module), id(module) in head_ids) for module in modules]
        # Modules within a head, such as its parametrisations.
        inner = {id(module) for head in heads for module in modules_except(head) if module is not head}
        others = [m for m in modules if not isinstance(m, nn.Linear) and id(m) not in inner]
        self.has_adapter_parameters = any(module._parameters for module in others)
        """True if adapters have parameters outside of linear layers (LoHa, VBLoRA). A disabled or merged adapter does
        not compute its product, so a call without such a product shows nothing about the next call."""

    def heads(self) -> list[nn.Module]:
        """Return the heads that still exist."""
        return [head for ref, is_head in self._modules if is_head and (head := ref()) is not None]

    def still_match(self, embedding: Any, patch: Any) -> bool:
        """Return True if the output embedding has the same modules as before, and its heads still have this patch."""
        modules = modules_except(embedding)
        return len(modules) == len(self._modules) and all(
            ref() is module and (not is_head or module.__dict__.get("_flce") is patch)
            for module, (ref, is_head) in zip(modules, self._modules, strict=True)
        )


def _is_patchable_linear(layer: nn.Linear) -> bool:
    weight = layer._parameters.get("weight")  # None for a parametrised layer, which computes its weight at each read
    return inspect.unwrap(type(layer).forward) is nn.Linear.forward and (weight is None or not is_quantised(weight))


def _quantised_kind(head: Any) -> str | None:
    """Return the dtype or class of the weights of a quantised head, or None if the head is not quantised."""
    tensors = [*head.parameters(recurse=False), *head.buffers(recurse=False)] if isinstance(head, nn.Module) else []
    for tensor in tensors:
        # Weights of bitsandbytes have a `quant_state` even before they are moved to a GPU, which quantises them.
        if tensor.dim() > 1 and (is_quantised(tensor) or hasattr(tensor, "quant_state")):
            return f"{tensor.dtype}" if type(tensor) in (Tensor, nn.Parameter) else type(tensor).__name__
    return None


def vocabulary_sizes(model: Any) -> frozenset[int]:
    """Return the numbers of classes that the logits of a language model may have."""
    embedding = model.get_output_embeddings()
    size = getattr(embedding, "out_features", getattr(embedding, "num_embeddings", None))
    if isinstance(size, int):
        return frozenset({size})
    config: Any = getattr(model, "config", None)
    configs = [] if config is None else [config, config.get_text_config(decoder=True)]
    return frozenset(c.vocab_size for c in configs if isinstance(getattr(c, "vocab_size", None), int))


def _reason_not_patchable(model: Any) -> str | None:
    """Return the reason why a model cannot be patched, or None if it can be or is patched."""
    if "_flce" in model.__dict__ or embedding_layers(model):
        return None
    name, head = type(model).__name__, model.get_output_embeddings()
    kind = f"{type(head).__module__}.{type(head).__qualname__}"
    quantised = _quantised_kind(head)
    if quantised is not None:
        return (
            f"the output embedding of {name} is a {kind} with {quantised} weights: a quantised head. Keep the head "
            "a plain torch.nn.Linear (for example by listing it among the modules that the quantiser skips) and patch "
            "again"
        )
    is_known_class = head is None or isinstance(head, nn.Embedding) or type(head).__module__.startswith("transformers.")
    if is_known_class and name in _language_model_class_names():
        return None  # `ProductMode` finds the product that computes the logits in the first call
    if head is None:
        return (
            f"{name} has no output embedding (get_output_embeddings() returns None); patch the model with the "
            "language-model head (for example the class ...ForCausalLM)"
        )
    return (
        f"the output embedding of {name} is a {kind}, without a plain torch.nn.Linear in it that computes the logits; "
        "only a plain torch.nn.Linear can be patched. Compute the loss with flce.fused_linear_cross_entropy, or let "
        "get_output_embeddings() return the layer"
    )


@functools.cache
def _language_model_class_names() -> frozenset[str]:
    """Return the names of the classes with a language-model head, from the tables of Transformers."""
    from transformers.models.auto import modeling_auto

    names: set[str] = set()
    for kind in ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"):
        for value in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES", {}).values():
            names.update((value,) if isinstance(value, str) else value)
    return frozenset(names)


class ProductMode(TorchFunctionMode):
    """A mode that calls ``replace`` for each matrix product of a layer.

    Args:
        replace: a function of ``(hidden, weight, bias)`` that returns lazy logits, or None to compute the product.
        only_linear: whether only calls of ``torch.nn.functional.linear`` are products, not ``matmul`` and ``einsum``.
    """

    def __init__(self, replace: Callable[..., Any], only_linear: bool) -> None:
        super().__init__()
        self._replace, self._only_linear = replace, only_linear
        self.replaced: list[Tensor] = []
        """Inputs of replaced products."""

    @skip_frame_and_callees  # runs outside of a graph if the compiler has ended a graph within the model
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A function that replaces `linear` may compute other products in an autograd function.
        product = _match_linear(func, args, kwargs) if func is F.linear or not self._only_linear else None
        logits = None if product is None else self._replace(*product)
        if product is None or logits is None:
            return func(*args, **kwargs)
        self.replaced.append(product[0])
        return logits


def _match_linear(func: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Return ``(hidden, weight, bias)`` of a call that computes a linear layer, else None."""
    if func is F.linear:
        arguments = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **kwargs}
        hidden, weight, bias = arguments["input"], arguments["weight"], arguments.get("bias")
    elif func is torch.einsum and len(args) == 3 and isinstance(args[0], str):
        fits = bool(re.fullmatch(r"(\w+)(\w),(\w)\2->\1\3", args[0].replace(" ", "")))
        hidden, weight, bias = args[1], args[2] if fits else None, None
    elif func in (torch.matmul, Tensor.matmul, Tensor.__matmul__) and len(args) == 2 and not kwargs:
        fits = isinstance(args[1], Tensor) and args[1].dim() == 2
        hidden, weight, bias = args[0], args[1].t() if fits else None, None
    else:
        return None
    fits = isinstance(hidden, Tensor) and isinstance(weight, Tensor) and weight.dim() == 2
    return (hidden, weight, bias) if fits else None
