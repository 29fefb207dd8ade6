"""Megatron-Core on a CPU: its code allocates tensors on a GPU, and calls CUDA for tensors in CPU memory too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class CpuMode(TorchFunctionMode):
    """A mode that allocates tensors in CPU memory instead of a GPU's memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is Tensor.type and len(args) == 1:  # the distributed optimizer expects the type of a GPU's tensor
            return str(func(*args)).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def make_norm(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **others: Any) -> nn.Module:
    """Return a norm. Without Apex and Transformer Engine Megatron-Core refuses sequence parallelism."""
    norm = nn.LayerNorm(hidden_size, eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


@contextlib.contextmanager
def replace_cuda() -> Iterator[None]:
    """Return a context in which the code of Megatron-Core runs on a CPU."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    patches: list[Any] = [
        mock.patch("torch.cuda.current_device", return_value="cpu"),
        mock.patch("torch.cuda.synchronize"),
        mock.patch("torch.cuda.current_stream"),  # of a newer DDP
        mock.patch("megatron.core.tensor_parallel.random._get_all_rng_states", return_value=()),  # of a recomputation
        mock.patch("megatron.core.tensor_parallel.random._set_all_rng_states"),
        mock.patch("torch.Tensor.cuda", lambda tensor, *_, **__: tensor),
        mock.patch.object(CudaRNGStatesTracker, "fork", side_effect=lambda *_: contextlib.nullcontext()),
        mock.patch.object(WrappedTorchNorm, "__new__", make_norm),
        CpuMode(),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield
