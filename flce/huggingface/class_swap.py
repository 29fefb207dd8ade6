"""Modules with other methods, by another ``__class__`` on the instance.

Tied weights, ``state_dict``, ``deepcopy``, ``pickle`` and ``save_pretrained`` do not see a difference, and neither do
wrappers that call ``model.forward`` directly, which would go round a hook.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from torch import nn

# What the other class has in place of the original's.
MethodFactory = Callable[[Any], dict[str, Callable[..., Any]]]


def replace_class(module: nn.Module, methods: MethodFactory) -> None:
    """Put ``methods(original)`` in the place of the module's own, where ``original`` is its class."""
    _set_class(module, lambda original: _subclass_with_methods(original, methods))


def restore_class(module: nn.Module) -> None:
    """Undo :func:`replace_class`, unless something else has changed the class since."""
    _set_class(module, lambda other: vars(other).get("_flce_original_class", other))


def _set_class(module: Any, replaced: Callable[[Any], Any]) -> None:
    kind: Any = type(module)
    if nn.utils.parametrize.is_parametrized(module) and any(name in vars(kind) for name in module.parametrizations):
        # A class that holds the parametrisations, and that their removal takes away: ours has to be below it.
        other = type(kind.__name__, (replaced(kind.__bases__[0]),), dict(vars(kind)))
    else:
        other = replaced(kind)
    object.__setattr__(module, "__class__", other)  # Lightning Fabric's modules set attributes of what they wrap
    # Accelerate's hooks keep the method they replaced on the instance, out of reach of the class.
    old_forward = module.__dict__.get("_old_forward")
    if getattr(old_forward, "__func__", None) is kind.forward:
        module._old_forward = types.MethodType(type(module).forward, module)


@functools.cache
def _subclass_with_methods(original: Any, methods: MethodFactory) -> Any:
    """A subclass that looks like ``original`` and has other methods."""

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        # The class cannot be found by its name; make it anew.
        _, _, *state = super(other, self).__reduce_ex__(max(2, protocol))
        return _new_instance, (original, methods), *state

    same = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    own = {"__reduce_ex__": __reduce_ex__, "_flce_original_class": original, **methods(original)}
    other: Any = type(original.__name__, (original,), {**same, **own})
    return other


def _new_instance(original: Any, methods: MethodFactory) -> Any:
    other = _subclass_with_methods(original, methods)
    return other.__new__(other)
