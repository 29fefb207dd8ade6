"""``patch_model``: make a model's output embedding return lazy logits while a loss is going to be computed.

Two changes are made to a model, both undone by :func:`unpatch_model`:

* the output embedding, an ``nn.Linear``, becomes a :class:`LazyHead`: same instance, same parameters,
  another ``__class__``. Tied weights, ``state_dict``, ``deepcopy``, ``pickle`` and ``save_pretrained`` do
  not see a difference, which an instance-level ``forward`` could not promise (a copy's bound method is lost
  by pickle, and shared by ``nn.DataParallel`` replicas);
* a forward pre-hook on the model notes whether ``labels`` were given.

The head is lazy when labels were given, or when it is in training mode with gradients enabled. So a model
that is evaluated with labels computes the fused loss, a training loop that computes its own cross-entropy
gets it too, and ``generate()`` and inference run the head's stock code. Wrappers that call an inner model's
``forward`` directly go round the hook (PEFT, when patched before it wraps): training is lazy all the same,
and evaluation has stock's loss at stock's memory.
"""

from __future__ import annotations

import inspect
import types
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from flce.functional import check_options
from flce.huggingface.lazy_logits import head_state, make_lazy
from flce.planning import ChunkOptions

ModelT = TypeVar("ModelT", bound=nn.Module)


class LazyHead(nn.Linear):
    """The output embedding of a patched model. Not constructed: an ``nn.Linear``'s class is set to it."""

    _flce_options: Any
    _flce_loss_expected: bool

    def forward(self, input: Tensor) -> Tensor:
        """Hidden states ``(..., H)`` to logits ``(..., V)``, lazy ones when a loss is expected."""
        expected = self._flce_loss_expected or (self.training and torch.is_grad_enabled())
        if not expected or not _can_be_lazy(input, self.weight, self.bias):
            return super().forward(input)
        lazy: Any = make_lazy(head_state(input, self.weight, self.bias, self._flce_options))
        return lazy


def _can_be_lazy(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the fused loss can stand for this call. If not, stock code runs, and reports what is wrong."""
    if type(hidden) is not Tensor or type(weight) not in (Tensor, nn.Parameter):
        return False  # DTensor, fake and quantised tensors
    if not hidden.is_floating_point() or hidden.dim() == 0 or hidden.shape[-1] != weight.shape[-1]:
        return False
    if hidden.device != weight.device:
        return False
    same_dtype = hidden.dtype == weight.dtype and (bias is None or bias.dtype == weight.dtype)
    if not same_dtype and not torch.is_autocast_enabled(hidden.device.type):
        return False
    if torch.compiler.is_compiling():
        return True
    # A transform (torch.func) or a tracer records what it sees and could not replay our objects.
    return torch._C._functorch.peek_interpreter_stack() is None and not torch._C._get_tracing_state()


class _WatchLabels:
    """Forward pre-hook: tells the head whether this call has labels. A class, so that pickles keep it."""

    def __init__(self, options: Any, labels_position: int | None) -> None:
        self.options = options
        self.labels_position = labels_position

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Looked up each time: resizing the vocabulary replaces the head, and replicas have their own.
        head = module.get_output_embeddings()  # type: ignore[operator]
        if not isinstance(head, LazyHead):
            if torch.compiler.is_compiling() or not _is_plain_linear(head):
                return
            _swap(head, self.options)
        labels = kwargs.get("labels")
        if labels is None and self.labels_position is not None and len(args) > self.labels_position:
            labels = args[self.labels_position]
        head._flce_loss_expected = labels is not None


class _ForgetLabels:
    """Forward hook: what the pre-hook noted holds for one call."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        head = module.get_output_embeddings()  # type: ignore[operator]
        if isinstance(head, LazyHead):
            head._flce_loss_expected = False


def patch_model(model: ModelT, *, options: ChunkOptions | None = None) -> ModelT:
    """Compute a model's cross-entropy loss without its logits. The model is changed in place.

    Loss, gradients and generated text are the stock model's. ``outputs.logits`` is a
    :class:`~flce.huggingface.LazyLogits` where a loss was computed, which turns into the real logits when
    something reads them.

    Args:
        model: any model with ``get_output_embeddings()``, as Transformers' ``PreTrainedModel`` and PEFT's
            wrappers have.
        options: ``flce.ChunkOptions`` for the fused loss.

    Returns:
        ``model``. Patching a patched model only replaces its options.

    Raises:
        TypeError: the model has no output embedding, or it is not a plain ``nn.Linear`` with floating-point
            weights.
    """
    check_options(options)
    head = _output_embedding(model)
    if not isinstance(head, LazyHead):
        _check_head(model, head)
        _swap(head, options)
    head._flce_options = options
    watch = next((hook for hook in model._forward_pre_hooks.values() if isinstance(hook, _WatchLabels)), None)
    if watch is not None:
        watch.options = options
        return model
    model.register_forward_pre_hook(_WatchLabels(options, _labels_position(model)), with_kwargs=True)
    model.register_forward_hook(_ForgetLabels(), always_call=True)
    return model


def unpatch_model(model: ModelT) -> ModelT:
    """Undo :func:`patch_model`, wherever in ``model`` it was applied. A model that is not patched is left
    as it is.

    Returns:
        ``model``.
    """
    for module in model.modules():
        for key in [k for k, hook in module._forward_pre_hooks.items() if isinstance(hook, _WatchLabels)]:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
        for key in [k for k, hook in module._forward_hooks.items() if isinstance(hook, _ForgetLabels)]:
            del module._forward_hooks[key]
            module._forward_hooks_always_called.pop(key, None)
        if isinstance(module, LazyHead):
            _swap_back(module)
    return model


def is_patched(model: nn.Module) -> bool:
    """Whether :func:`patch_model` was applied to ``model`` or to a model that it wraps."""
    return any(
        isinstance(hook, _WatchLabels) for module in model.modules() for hook in module._forward_pre_hooks.values()
    )


def _output_embedding(model: nn.Module) -> Any:
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch_model expects a torch.nn.Module, got {type(model).__name__}")
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    if head is None:
        hint = "patch the model with the language-model head (for example the class ...ForCausalLM)"
        if isinstance(getattr(model, "module", None), nn.Module):
            hint = "it looks like a wrapper around another model: patch the model before wrapping it"
        raise TypeError(
            f"{type(model).__name__} has no output embedding (get_output_embeddings() is missing or returns "
            f"None); {hint}"
        )
    return head


def _is_plain_linear(head: Any) -> bool:
    return isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward and head.weight.is_floating_point()


def _check_head(model: nn.Module, head: Any) -> None:
    if _is_plain_linear(head):
        return
    kind = f"{type(head).__module__}.{type(head).__qualname__}"
    if isinstance(head, nn.Linear):
        raise TypeError(
            f"the output embedding of {type(model).__name__} is a {kind} with {head.weight.dtype} weights: a "
            "quantised or otherwise customised head. Keep the head a plain torch.nn.Linear (for example by "
            "listing it among the modules that the quantiser skips) and patch again"
        )
    raise TypeError(
        f"the output embedding of {type(model).__name__} is a {kind}; only torch.nn.Linear can be patched. "
        "If it is an adapter around a linear layer, patch the model before adding the adapter"
    )


def _labels_position(model: nn.Module) -> int | None:
    """Where ``labels`` stands among the positional arguments of the model's forward; None: nowhere."""
    names = []
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            break
        names.append(parameter.name)
    return names.index("labels") if "labels" in names else None


def _swap(head: nn.Linear, options: Any) -> None:
    original = type(head)
    # A subclass that keeps nn.Linear's forward (a parametrised head, say) stays what it is, and is lazy as
    # well.
    head.__class__ = LazyHead if original is nn.Linear else type(original.__name__, (LazyHead, original), {})
    lazy: Any = head
    lazy._flce_original_class = original
    lazy._flce_options = options
    lazy._flce_loss_expected = False
    # Accelerate's hooks keep the method they replaced on the instance, out of reach of the class.
    kept = head.__dict__.get("_old_forward")
    if getattr(kept, "__func__", None) is nn.Linear.forward:
        lazy._old_forward = types.MethodType(LazyHead.forward, head)


def _swap_back(head: Any) -> None:
    head.__class__ = head._flce_original_class
    kept = head.__dict__.get("_old_forward")
    if getattr(kept, "__func__", None) is LazyHead.forward:
        head._old_forward = types.MethodType(nn.Linear.forward, head)
    for name in ("_flce_original_class", "_flce_options", "_flce_loss_expected"):
        del head.__dict__[name]
