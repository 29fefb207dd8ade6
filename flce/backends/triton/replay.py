"""Launches that are made ready once for each signature.

Triton looks at every argument of every launch, and a launch has up to forty of them: 0.1 ms of the host, beside a
kernel that may take 5 microseconds. All that it finds, and all that this package computes for a launch, depends on
nothing but types, shapes, strides and alignments of tensors and on numbers: the signature of a call of `run`. So the
launches of the first call with a signature are kept, compiled and with their arguments in order. Calls after it put
their own addresses in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flce.backends.triton.launch import Launch
from flce.core import private

# Signatures that are kept, enough for some hundred shapes, as batches of different lengths have them. At this number
# all are forgotten.
MAX_SIGNATURES = 4096
# Kernels and launch sizes may depend on an address modulo this many bytes, and on no more of it.
ADDRESS_BYTES = 16


class AddressSlot(NamedTuple):
    """The place of an address among the arguments of a launch."""

    argument: int
    tensor: int  # among those of the call
    offset: int  # bytes behind its beginning
    descriptor: dict[str, Any] | None  # what it is the base of; None: it is an argument itself


class PreparedLaunch(NamedTuple):
    """A launch that lacks its addresses."""

    compiled: Any
    start: Callable[..., None]  # of it, on its grid
    arguments: list[Any]  # in their order
    address_slots: tuple[AddressSlot, ...]

    def run(self, addresses: Sequence[int], stream: int) -> None:
        self.start(*self.fill_addresses(addresses), stream=stream)

    def fill_addresses(self, addresses: Sequence[int]) -> list[Any]:
        """The arguments, for tensors at these addresses."""
        arguments = self.arguments.copy()
        for argument, tensor, offset, descriptor in self.address_slots:
            address = addresses[tensor] + offset
            arguments[argument] = address if descriptor is None else _build_descriptor(descriptor, address)
        return arguments


class _Address(NamedTuple):
    """Stands for the base of a descriptor: a launch asks for its address only."""

    address: int

    def data_ptr(self) -> int:
        return self.address


_prepared: dict[tuple[Any, ...], tuple[PreparedLaunch, ...] | None] = {}


def run(list_launches: Callable[..., Iterable[Launch]], *args: Any) -> None:
    """Run the launches of ``list_launches(*args)``, one after the other, on the device of the first tensor; none if it
    is empty.

    Args:
        list_launches: a function of a module, which lists the launches. It may look at all of its arguments but values
        of
            tensors and, of their addresses, more than the alignment. What it takes from elsewhere must never change.
            The arguments of launches are tensors of `args`, views of these, or descriptors of both. With others, such
            as a copy that `list_launches` has made, the launches are made anew in every call.
        args: tensors, which are all on one device, tuples and lists of them, and what is hashable. Equal values are one
            signature, so each place has one type: 1, 1.0 and True are equal.
    """
    tensors: list[Tensor] = []
    key: list[Any] = [list_launches]
    _add_to_signature(args, key, tensors)
    if not tensors[0].numel():
        return
    addresses = [tensor.data_ptr() for tensor in tensors]
    # Which are one: an argument may have the memory of another in one call, and memory of its own in the next.
    key += [(address % ADDRESS_BYTES, addresses.index(address)) for address in addresses]
    device = tensors[0].device
    if not _can_replay(device):
        for launch in list_launches(*args):
            launch.run()
        return
    key.append(device.index)
    signature = tuple(key)
    # Triton launches on the current device, which need not be that of the tensors.
    if torch.cuda.current_device() == device.index:
        _run(signature, list_launches, args, tensors, addresses)
    else:
        with torch.cuda.device(device):
            _run(signature, list_launches, args, tensors, addresses)


def _can_replay(device: torch.device) -> bool:
    # On a CPU it is the interpreter, which compiles nothing.
    return device.type == "cuda" and private.triton_driver is not None


def clear() -> None:
    """For tests that change what launches are made of."""
    _prepared.clear()


def _run(
    signature: tuple[Any, ...],
    list_launches: Callable[..., Iterable[Launch]],
    args: tuple[Any, ...],
    tensors: Sequence[Tensor],
    addresses: Sequence[int],
) -> None:
    prepared = _prepared.get(signature)
    if prepared is not None:
        stream = private.triton_driver.active.get_current_stream(tensors[0].device.index)
        for one in prepared:
            one.run(addresses, stream)
        return
    new_launches: list[PreparedLaunch] | None = None if signature in _prepared else []
    for launch in list_launches(*args):
        compiled = launch.run()
        if new_launches is not None:
            prepared_launch = _prepare(launch, compiled, tensors, addresses)
            new_launches = None if prepared_launch is None else [*new_launches, prepared_launch]
        del launch  # and with it what memory only this one needs
    if signature not in _prepared:
        if len(_prepared) >= MAX_SIGNATURES:
            clear()
        _prepared[signature] = None if new_launches is None else tuple(new_launches)


def _add_to_signature(args: Iterable[Any], key: list[Any], tensors: list[Tensor]) -> None:
    """Adds what is known of the arguments without their addresses to `key`, and tensors to `tensors`."""
    for value in args:
        if isinstance(value, Tensor):
            tensors.append(value)
            key += (value.dtype, value.shape, value.stride())
        elif isinstance(value, (tuple, list)):
            key.append(len(value))
            _add_to_signature(value, key, tensors)
        else:
            key.append(value)


def _prepare(
    launch: Launch, compiled: Any, tensors: Sequence[Tensor], addresses: Sequence[int]
) -> PreparedLaunch | None:
    """None where an address is not one that the arguments of the call give, or where nothing was compiled."""
    if compiled is None:  # by the interpreter, of tensors on a GPU
        return None
    values = {**launch.options, **launch.args}
    arguments = [values[name] for name in launch.kernel.arg_names]
    address_slots = []
    for number, value in enumerate(arguments):
        base, descriptor = value, None
        if isinstance(value, TensorDescriptor):
            base, descriptor = value.base, {**vars(value), "base": None}
        if isinstance(base, Tensor):
            found = _locate(base, tensors, addresses)
            if found is None:
                return None
            arguments[number] = None
            address_slots.append(AddressSlot(number, *found, descriptor))
    grid = (*launch.grid, 1, 1)[:3]
    return PreparedLaunch(compiled, compiled[grid], arguments, tuple(address_slots))


def _locate(x: Tensor, tensors: Sequence[Tensor], addresses: Sequence[int]) -> tuple[int, int] | None:
    """Which of the tensors `x` is, or is a view of, and how many bytes behind its beginning.

    A view lies within what it is a view of. So where `x` lies within one of the tensors only, it is that one's.
    """
    for number, tensor in enumerate(tensors):
        if x is tensor:
            return number, 0
    begin, end = _byte_range(x)
    storage = x.untyped_storage().data_ptr()
    candidates = {
        address: number
        for number, (tensor, address) in reversed(list(enumerate(zip(tensors, addresses, strict=True))))
        if tensor.untyped_storage().data_ptr() == storage and address <= begin and end <= _byte_range(tensor)[1]
    }
    if len(candidates) != 1:  # it may be a view of any of several that share memory
        return None
    ((address, number),) = candidates.items()
    return number, begin - address


def _byte_range(x: Tensor) -> tuple[int, int]:
    """The first of its bytes, and the one behind its last."""
    begin = x.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return begin, begin + (last + 1 if x.numel() else 0) * x.element_size()


def _build_descriptor(descriptor: dict[str, Any], address: int) -> TensorDescriptor:
    tensor_descriptor = TensorDescriptor.__new__(TensorDescriptor)
    vars(tensor_descriptor).update(descriptor, base=_Address(address))
    return tensor_descriptor
