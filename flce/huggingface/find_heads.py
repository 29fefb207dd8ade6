"""Which modules of a model make logits of the vocabulary, or which matrix products where no module is known to.

A model names its output embedding. Linear layers in it that are as wide as the vocabulary make the logits. There may be
several: adapters (LoRA, copies to be trained) wrap the original one and add to it. Heads may be beside it, as Medusa's.

Some models make their logits elsewhere, or in no layer at all. The matrix products of a call show where.
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
from flce.torch_ops.frames import skip_frame_and_callees


def find_owners(module: Any, name: str = "") -> tuple[list[Any], dict[str, str]]:
    """The outermost modules with an output embedding, of which there may be several; and by name why others stay."""
    has_embedding = hasattr(type(module), "get_output_embeddings")
    reason = _reason_not_patchable(module) if has_embedding else None
    if has_embedding and reason is None:
        return [module], {}
    owners: list[Any] = []
    left: dict[str, str] = {}
    for child_name, child in module.named_children():
        found, others = find_owners(child, f"{name}.{child_name}".lstrip("."))
        owners += found
        left |= others
    if reason is not None and (not owners or module.get_output_embeddings() is not None):
        left = {name: reason}
    return owners, left


def modules_except(module: Any, others: Sequence[nn.Module] = ()) -> list[nn.Module]:
    """``module`` and what is in it, without ``others`` and what is in them; nothing of what is no module."""
    found: list[nn.Module] = []
    waiting, seen = [module] if isinstance(module, nn.Module) else [], {id(other) for other in others}
    while waiting:  # no generators: this happens in each call of a model
        module = waiting.pop()
        if id(module) not in seen:
            seen.add(id(module))
            found.append(module)
            waiting += [child for child in reversed(module._modules.values()) if child is not None]
    return found


def backbone(owner: Any) -> nn.Module:
    """The model below the head; the model itself where it does not name one."""
    below = getattr(owner, "base_model", owner)
    return below if isinstance(below, nn.Module) else owner


def find_heads(owner: Any, others: Iterable[nn.Module] = ()) -> list[nn.Linear]:
    """The layers of the output embedding, and heads with the same number of classes beside it and the model below it.

    Args:
        owner: a model with an output embedding.
        others: modules outside of ``owner`` that may be heads of it.
    """
    embedding = owner.get_output_embeddings()
    sizes = vocabulary_sizes(owner, embedding)
    layers, below = _vocabulary_layers(modules_except(embedding), sizes), backbone(owner)
    if not layers:
        return []
    own: Iterable[nn.Module] = modules_except(owner, [below])
    if below is owner:  # which does not say what is below the head: only what looks just like it
        own = (m for m in owner.children() if getattr(m, "in_features", None) == layers[0].in_features)
    return layers + _vocabulary_layers([*own, *others], sizes)


def embedding_layers(owner: Any) -> list[nn.Linear]:
    """The linear layers in the output embedding that make logits; none where it has no such."""
    head = owner.get_output_embeddings()
    return _vocabulary_layers(modules_except(head), vocabulary_sizes(owner, head))


def _vocabulary_layers(modules: Iterable[nn.Module], sizes: frozenset[int]) -> list[nn.Linear]:
    """The plain linear layers among ``modules`` that have one of these numbers of outputs, the vocabulary's."""
    return [m for m in modules if isinstance(m, nn.Linear) and m.out_features in sizes and _is_patchable_linear(m)]


class HeadModules:
    """The modules in a model's output embedding, and which of them make logits.

    Args:
        embedding: the output embedding.
        heads: what `find_heads` has found.
    """

    def __init__(self, embedding: Any, heads: Sequence[nn.Linear]) -> None:
        found = {id(head) for head in heads}
        modules = modules_except(embedding)
        self._modules = [(weakref.ref(module), id(module) in found) for module in modules]
        parts = {id(part) for head in heads for part in modules_except(head) if part is not head}
        others = [m for m in modules if not isinstance(m, nn.Linear) and id(m) not in parts]
        self.has_adapter_parameters = any(module._parameters for module in others)
        """Whether adapters have parameters outside of linear layers (LoHa, VBLoRA): only sometimes their products are
        called, as adapters can be disabled or merged."""

    def still_match(self, embedding: Any, patch: Any) -> bool:
        """Whether the output embedding has the same modules as then, and its heads still have this patch."""
        modules = modules_except(embedding)
        return len(modules) == len(self._modules) and all(
            ref() is module and (not is_head or module.__dict__.get("_flce") is patch)
            for module, (ref, is_head) in zip(modules, self._modules, strict=True)
        )


def _is_patchable_linear(layer: nn.Linear) -> bool:
    weight = _weight_parameter(layer)
    return inspect.unwrap(type(layer).forward) is nn.Linear.forward and (weight is None or not is_quantised(weight))


def _weight_parameter(layer: nn.Module) -> Tensor | None:
    """The parameter; None for a parametrised layer, which makes its weight whenever it is read."""
    return layer._parameters.get("weight")


def _quantised_kind(head: Any) -> str | None:
    """The kind of the weights of a quantised head; None: it is not one."""
    tensors = [*head.parameters(recurse=False), *head.buffers(recurse=False)] if isinstance(head, nn.Module) else []
    for tensor in tensors:
        # Of bitsandbytes' layers also before they are moved to a GPU, which quantises them.
        if tensor.dim() > 1 and (is_quantised(tensor) or hasattr(tensor, "quant_state")):
            return f"{tensor.dtype}" if type(tensor) in (Tensor, nn.Parameter) else type(tensor).__name__
    return None


def vocabulary_sizes(owner: Any, head: Any) -> frozenset[int]:
    """The numbers of classes that logits of a model may have."""
    size = getattr(head, "out_features", getattr(head, "num_embeddings", None))
    if isinstance(size, int):
        return frozenset({size})
    config: Any = getattr(owner, "config", None)
    configs = [] if config is None else [config, config.get_text_config(decoder=True)]
    return frozenset(c.vocab_size for c in configs if isinstance(getattr(c, "vocab_size", None), int))


def _reason_not_patchable(owner: Any) -> str | None:
    """Why a model cannot be patched; None: it can, or is."""
    if "_flce" in owner.__dict__ or embedding_layers(owner):
        return None
    name, head = type(owner).__name__, owner.get_output_embeddings()
    kind = f"{type(head).__module__}.{type(head).__qualname__}"
    quantised = _quantised_kind(head)
    if quantised is not None:
        return (
            f"the output embedding of {name} is a {kind} with {quantised} weights: a quantised head. Keep the head "
            "a plain torch.nn.Linear (for example by listing it among the modules that the quantiser skips) and patch "
            "again"
        )
    own = head is None or isinstance(head, nn.Embedding) or type(head).__module__.startswith("transformers.")
    if own and name in _language_model_class_names():
        return None  # makes its logits in its own way, which the first call will find
    if head is None:
        return (
            f"{name} has no output embedding (get_output_embeddings() returns None); patch the model with the "
            "language-model head (for example the class ...ForCausalLM)"
        )
    return (
        f"the output embedding of {name} is a {kind}, with no plain torch.nn.Linear in it that makes the logits; only "
        "such a layer can be patched. Compute the loss with flce.fused_linear_cross_entropy, or let "
        "get_output_embeddings() return the layer"
    )


@functools.cache
def _language_model_class_names() -> frozenset[str]:
    """Classes of Transformers with a language-model head, by its own account."""
    from transformers.models.auto import modeling_auto

    names: set[str] = set()
    for kind in ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"):
        for value in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES", {}).values():
            names.update((value,) if isinstance(value, str) else value)
    return frozenset(names)


class VocabularyProductMode(TorchFunctionMode):
    """Offers every matrix product that is as wide as the vocabulary to ``replace``.

    Args:
        owner: the model that runs. Where its output embedding has linear layers, products with parameters of other
            layers are passed over.
        replace: ``(hidden, weight, bias)`` to what stands for their product; to None: it is computed.
    """

    def __init__(self, owner: Any, replace: Callable[[Tensor, Tensor, Tensor | None], Any]) -> None:
        super().__init__()
        self.replaced: list[Tensor] = []
        """Inputs of replaced products. Other products of these inputs are logits too."""
        self._sizes, self._replace = vocabulary_sizes(owner, owner.get_output_embeddings()), replace
        self._heads = [_weight_parameter(layer) for layer in embedding_layers(owner)]

    @skip_frame_and_callees  # where a graph has ended within the model
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        product = _match_linear(func, args, kwargs)
        if product is not None and self._is_logits_product(product[0], product[1]):
            logits = self._replace(*product)
            if logits is not None:
                self.replaced.append(product[0])
                return logits
        return func(*args, **kwargs)

    def _is_logits_product(self, hidden: Tensor, weight: Tensor) -> bool:
        wide = weight.shape[0] in self._sizes or any(hidden is other for other in self.replaced)
        source = weight if weight._base is None else weight._base
        foreign = isinstance(source, nn.Parameter) and not any(source is head for head in self._heads)
        return wide and hidden.dim() > 1 and not (self._heads and foreign)


def _match_linear(func: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """``(hidden, weight, bias)`` of a call that is a linear layer by its arguments, else None."""
    if func is F.linear:
        given = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **kwargs}
        hidden, weight, bias = given["input"], given["weight"], given.get("bias")
    elif func is torch.einsum and len(args) == 3 and isinstance(args[0], str):
        fits = bool(re.fullmatch(r"(\w+)(\w),(\w)\2->\1\3", args[0].replace(" ", "")))
        hidden, weight, bias = args[1], args[2] if fits else None, None
    elif func in (torch.matmul, Tensor.matmul, Tensor.__matmul__) and len(args) == 2 and not kwargs:
        fits = isinstance(args[1], Tensor) and args[1].dim() == 2
        hidden, weight, bias = args[0], args[1].t() if fits else None, None
    else:
        return None
    fits = type(hidden) is Tensor and isinstance(weight, Tensor) and weight.dim() == 2
    return (hidden, weight, bias) if fits else None
