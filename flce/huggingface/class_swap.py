"""Replacement of methods of single modules, by another ``__class__`` on the instance. ``patch.py`` calls this module.

Tied weights, ``state_dict``, ``deepcopy``, ``pickle`` and ``save_pretrained`` work as before. Wrappers that call
``model.forward`` directly call the replaced method, whereas they would bypass a hook.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from torch import nn

# Maps the original class to the methods of the subclass that replaces it.
MethodFactory = Callable[[Any], dict[str, Callable[..., Any]]]


def replace_class(module: nn.Module, make_methods: MethodFactory) -> None:
    """Replace methods of ``module`` by ``make_methods(original)``. ``original`` is the class of the module."""
    _set_class(module, lambda original: _subclass_with_methods(original, make_methods))


def restore_class(module: nn.Module) -> None:
    """Undo :func:`replace_class`, unless other code has changed the class since."""
    _set_class(module, lambda other: vars(other).get("_flce_original_class", other))


def _set_class(module: Any, replacement: Callable[[Any], Any]) -> None:
    current_class: Any = type(module)
    if nn.utils.parametrize.is_parametrized(module) and any(
        name in vars(current_class) for name in module.parametrizations
    ):
        # PyTorch has put a class with the parametrisations on top of the original class, and removes it together with
        # them. So the replacement has to be the base of this class.
        new_class = type(current_class.__name__, (replacement(current_class.__bases__[0]),), dict(vars(current_class)))
    else:
        new_class = replacement(current_class)
    # `module.x = ...` of a Lightning Fabric module sets x of the wrapped module instead.
    object.__setattr__(module, "__class__", new_class)
    # Accelerate's hooks store the method that they replace on the instance, where a change of class has no effect.
    old_forward = module.__dict__.get("_old_forward")
    if getattr(old_forward, "__func__", None) is current_class.forward:
        module._old_forward = types.MethodType(type(module).forward, module)


@functools.cache
def _subclass_with_methods(original: Any, make_methods: MethodFactory) -> Any:
    """Return a subclass with ``make_methods(original)`` and with the name, module and docstring of ``original``."""

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        # pickle cannot import the subclass by its name, so `_new_instance` creates it again.
        _, _, *state = super(subclass, self).__reduce_ex__(max(2, protocol))
        return _new_instance, (original, make_methods), *state

    inherited = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    replaced = {"__reduce_ex__": __reduce_ex__, "_flce_original_class": original, **make_methods(original)}
    subclass: Any = type(original.__name__, (original,), {**inherited, **replaced})
    return subclass


def _new_instance(original: Any, make_methods: MethodFactory) -> Any:
    subclass = _subclass_with_methods(original, make_methods)
    return subclass.__new__(subclass)
