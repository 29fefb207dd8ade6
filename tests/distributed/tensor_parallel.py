"""Functions that `test_tensor_parallel.py` runs in every process: patched models whose head is divided by classes."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import flce
from flce.huggingface import MaterializedLogitsError, MaterializedLogitsWarning
from tests.distributed.training import (
    LOSSES,
    STEPS,
    adamw,
    batch,
    check_fused,
    check_same,
    device,
    from_transformers,
    gather_full,
    shifted,
    tiny_llama,
    with_lora,
)

GATHERED = ColwiseParallel(output_layouts=Replicate())
DTENSOR = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)


def _mesh(*sizes: int) -> Any:
    names = ("replicate", "shard", "tp")[-len(sizes) :]
    return init_device_mesh(device().type, sizes, mesh_dim_names=names)


def _pytorch(plan: Callable[[], dict[str, Any]], patch_first: bool = True) -> Callable[[Any], Any]:
    def wrap(model: Any) -> Any:
        mesh = _mesh(dist.get_world_size())
        if not patch_first:
            return flce.patch_model(parallelize_module(model, mesh, plan()))
        return parallelize_module(flce.patch_model(model), mesh, plan())

    return wrap


def _transformers(**config: Any) -> Callable[[Any], Any]:
    return lambda model: flce.patch_model(from_transformers(model, tp_plan="auto", **config))


def _fsdp2(*sizes: int, reshard: bool) -> Callable[[Any], Any]:
    """Divide the head over the last dimension of a mesh, and shard the model over the others."""

    def wrap(model: Any) -> Any:
        from torch.distributed.fsdp import fully_shard

        mesh = _mesh(*sizes)
        parallelize_module(flce.patch_model(model), mesh["tp"], {"lm_head": GATHERED})
        data = mesh[mesh.mesh_dim_names[:-1]]
        for unit in (*model.model.layers, [model.model.norm, model.lm_head]):
            fully_shard(unit, mesh=data, reshard_after_forward=reshard)
        return fully_shard(model, mesh=data)

    return wrap


def _compiled_layers(model: Any) -> Any:
    for layer in model.model.layers:
        layer.compile(backend="eager", fullgraph=True)
    return _pytorch(lambda: {"lm_head": GATHERED})(model)


def _checkpointed(model: Any) -> Any:
    model.gradient_checkpointing_enable()
    return _transformers(tp_size=2)(model)


STYLES: dict[str, Callable[[Any], Any]] = {
    "gathered": _pytorch(lambda: {"lm_head": GATHERED}),
    "patched after": _pytorch(lambda: {"lm_head": GATHERED}, patch_first=False),
    "DTensor": _pytorch(lambda: {"lm_head": DTENSOR}),
    # The head waits for the gather of its input, which PyTorch starts without waiting.
    "gathered input": _pytorch(
        lambda: {
            "model.norm": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0)),
            "lm_head": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
        }
    ),
    "compiled layers": _compiled_layers,
    "transformers": _transformers(tp_size=2),
    "transformers, checkpointed": _checkpointed,
    "transformers, 2 x 2": _transformers(tp_size=2, fsdp_size=2),
    "2 x 2": _fsdp2(2, 2, reshard=False),
    "2 x 2, resharded": _fsdp2(2, 2, reshard=True),
    "2 x 1 x 2, resharded": _fsdp2(2, 1, 2, reshard=True),
}


def num_items(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(11, device=ids.device)).loss


def lse_and_gather(model: Any, ids: Tensor) -> Tensor:
    """Return a loss from the logits of the targets, which are computed in the processes that have their classes."""
    logits, target = shifted(model(input_ids=ids).logits, ids)
    values: Tensor = logits.logsumexp(-1) - logits.gather(-1, target[:, None]).squeeze(-1)
    return values.mean()


ALL_LOSSES = LOSSES | {"num_items": num_items, "lse and gather": lse_and_gather}


def _train(model: Any, loss: str, ranks: range, style: str = "") -> dict[str, Any]:
    """Return the mean losses of some steps with the batches of these ranks, and the gradients of the first step."""
    optimizer, losses, gradients = adamw(model), [], {}
    context = loss_parallel() if style == "DTensor" else contextlib.nullcontext()
    for step in range(STEPS):
        total = 0.0
        for rank in ranks:
            with context if rank == ranks[0] else contextlib.nullcontext():
                value = ALL_LOSSES[loss](model, batch(rank, step)) / len(ranks)
                value.backward()
            total += gather_full(value).item()
        if step == 0:
            gradients = {name: gather_full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
        context = loss_parallel() if style == "DTensor" else contextlib.nullcontext()
    return {"losses": losses, "gradients": gradients}


def compare(style: str, loss: str, trained: str = "all", **config: Any) -> None:
    """Compare losses and gradients of a patched model under tensor parallelism with stock in one process."""
    warnings.simplefilter("ignore" if loss == "real logits" else "error", MaterializedLogitsWarning)
    torch._dynamo.reset()
    stock = tiny_llama(num_key_value_heads=2, **config)
    if trained != "all":
        stock = with_lora(trained)(stock)
    copied = copy.deepcopy(stock)
    model = STYLES[style](copied)
    data_ranks = dist.get_world_size() // 2 if " x " in style else 1
    mine = dist.get_rank() // 2 if data_ranks > 1 else 0
    got, expected = _train(model, loss, range(mine, mine + 1), style), _train(stock, loss, range(data_ranks))
    if data_ranks > 1:
        losses = torch.tensor(got["losses"])
        dist.all_reduce(losses)
        got["losses"] = (losses / dist.get_world_size()).tolist()
    check_same(got, expected, 1e-5)
    check_fused(model, 0 if loss in ("materialized", "real logits") else STEPS)
