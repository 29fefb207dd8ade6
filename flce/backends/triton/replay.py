"""`run` launches kernels. It prepares the launches of each signature once and replays them with new addresses.

All launches of this package go through `run`. Triton inspects each argument of each launch, and a launch has up to
forty arguments: this takes 0.1 ms of the host, for a kernel that may take 5 microseconds. The results depend only on
types, shapes, strides and alignments of tensors and on numbers, which are the signature of a call of `run`. Therefore
the first call with a signature stores its compiled launches and their arguments in order. Later calls only insert their
addresses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flce.backends.triton.launch import Launch
from flce.core import private

# Stored signatures: enough for some hundred shapes, because batches have different lengths. At this number all are
# deleted.
MAX_SIGNATURES = 4096
# Stored descriptors of an argument.
MAX_DESCRIPTORS = 8
# Kernels and launch sizes may depend only on an address modulo these bytes.
ADDRESS_BYTES = 16


class AddressSlot(NamedTuple):
    """An argument of a launch that needs the address of a tensor."""

    argument: int
    tensor: int  # index of the tensor in the call
    offset: int  # bytes behind the beginning of the tensor
    descriptor_at: Callable[[int], TensorDescriptor] | None  # None: the argument is the address


class PreparedLaunch(NamedTuple):
    """A compiled launch without its addresses."""

    compiled: Any
    start: Callable[..., None]  # launches `compiled` on its grid
    arguments: list[Any]  # in the order of the kernel's parameters
    address_slots: tuple[AddressSlot, ...]

    def run(self, addresses: Sequence[int], stream: int) -> None:
        arguments = self.arguments.copy()
        for argument, tensor, offset, descriptor_at in self.address_slots:
            address = addresses[tensor] + offset
            arguments[argument] = address if descriptor_at is None else descriptor_at(address)
        self.start(*arguments, stream=stream)


def _copies_by_address(descriptor: TensorDescriptor) -> Callable[[int], TensorDescriptor]:
    """Return a function that returns a copy of the descriptor for an address. The allocator returns few different
    addresses."""
    fields = {**vars(descriptor), "base": None}

    @functools.lru_cache(MAX_DESCRIPTORS)
    def copy_at(address: int) -> TensorDescriptor:
        copy = TensorDescriptor.__new__(TensorDescriptor)
        # A launch reads only the address of the base.
        vars(copy).update(fields, base=SimpleNamespace(data_ptr=lambda: address))
        return copy

    return copy_at


_prepared: dict[tuple[Any, ...], tuple[PreparedLaunch, ...] | None] = {}


def run(list_launches: Callable[..., Iterable[Launch]], *args: Any) -> None:
    """Run the launches of ``list_launches(*args)``, one after the other, on the device of the first tensor. If the
    first tensor is empty, run no launch.

    Args:
        list_launches: a module-level function that yields the launches. The launches may depend on all properties of
            `args` except the values of tensors and, for addresses, more than their alignment. All other inputs must be
            constant. Tensor arguments of launches are tensors of `args`, views of these tensors, or descriptors of
            both. With any other tensor, for example a copy that `list_launches` allocates, each call builds its
            launches again.
        args: tensors, all on one device; tuples and lists of tensors; hashable values. Equal values are one signature,
            so each argument always has the same type: 1, 1.0 and True are equal.
    """
    tensors: list[Tensor] = []
    key: list[Any] = [list_launches]
    _add_to_signature(args, key, tensors)
    if not tensors[0].numel():
        return
    addresses = [tensor.data_ptr() for tensor in tensors]
    key += [address % ADDRESS_BYTES for address in addresses]
    # Which tensors share an address may differ from call to call.
    if len({*addresses}) < len(addresses):
        key += [addresses.index(address) for address in addresses]
    device = tensors[0].device
    if not _can_replay(device):
        for launch in list_launches(*args):
            launch.run()
        return
    key.append(device.index)
    signature = tuple(key)
    # Triton launches on the current device, which may not be the tensors' device.
    if torch.cuda.current_device() == device.index:
        _run(signature, list_launches, args, tensors, addresses)
    else:
        with torch.cuda.device(device):
            _run(signature, list_launches, args, tensors, addresses)


def _can_replay(device: torch.device) -> bool:
    # On a CPU the interpreter runs kernels and compiles none.
    return device.type == "cuda" and private.triton_driver is not None


def clear() -> None:
    """Delete the stored launches, for tests that change inputs of `list_launches`."""
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
        for prepared_launch in prepared:
            prepared_launch.run(addresses, stream)
        return
    new_launches: list[PreparedLaunch] | None = None if signature in _prepared else []
    for launch in list_launches(*args):
        compiled = launch.run()
        if new_launches is not None:
            new = _prepare(launch, compiled, tensors, addresses)
            new_launches = None if new is None else [*new_launches, new]
        del launch  # frees memory that only this launch needs
    if signature not in _prepared:
        if len(_prepared) >= MAX_SIGNATURES:
            clear()
        _prepared[signature] = None if new_launches is None else tuple(new_launches)


def _add_to_signature(args: Iterable[Any], key: list[Any], tensors: list[Tensor]) -> None:
    """Append the properties of the arguments, without addresses, to `key`, and the tensors to `tensors`."""
    for value in args:
        if value is None:  # the most frequent value, first to save time
            key.append(None)
        elif isinstance(value, Tensor):
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
    """Return the launch for replay, or None if a tensor is not from the call's arguments or if nothing was compiled."""
    if compiled is None:  # the interpreter ran the kernel on tensors of a GPU
        return None
    values = {**launch.options, **launch.args}
    arguments = [values[name] for name in launch.kernel.arg_names]
    address_slots = []
    for number, value in enumerate(arguments):
        base, descriptor_at = value, None
        if isinstance(value, TensorDescriptor):
            base, descriptor_at = value.base, _copies_by_address(value)
        if isinstance(base, Tensor):
            found = _locate(base, tensors, addresses)
            if found is None:
                return None
            arguments[number] = None
            address_slots.append(AddressSlot(number, *found, descriptor_at))
    grid = (*launch.grid, 1, 1)[:3]
    return PreparedLaunch(compiled, compiled[grid], arguments, tuple(address_slots))


def _locate(x: Tensor, tensors: Sequence[Tensor], addresses: Sequence[int]) -> tuple[int, int] | None:
    """Return the index of the tensor that `x` is, or is a view of, and the offset of `x` in bytes; or None.

    A view lies within its base. Therefore `x` is a view of a tensor if it lies within this tensor and no other.
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
    if len(candidates) != 1:  # several tensors share memory: `x` may be a view of each
        return None
    ((address, number),) = candidates.items()
    return number, begin - address


def _byte_range(x: Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte and of the byte behind the last one."""
    begin = x.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return begin, begin + (last + 1 if x.numel() else 0) * x.element_size()
