"""Wrappers of torch.distributed around a patched model, in a world of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from flce.huggingface import patch_model

pytest.importorskip("transformers")
if not dist.is_available():
    pytest.skip("PyTorch without torch.distributed", allow_module_level=True)

IDS = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _world_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def auxiliary(model: Any) -> Tensor:
    """The model's loss, and others made from its logits."""
    outputs = model(input_ids=IDS, labels=IDS)
    logits = outputs.logits
    return outputs.loss + 0.5 * logits.logsumexp(-1).square().mean() + logits.softmax(-1).square().sum()


LOSSES: dict[str, Callable[[Any], Tensor]] = {
    "labels": lambda model: model(input_ids=IDS, labels=IDS).loss,
    "own loss": lambda model: F.cross_entropy(model(input_ids=IDS).logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()),
    "auxiliary": auxiliary,
}


@pytest.mark.filterwarnings("ignore::flce.huggingface.MaterializedLogitsWarning")
@pytest.mark.parametrize("find_unused_parameters", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_ddp(loss: str, find_unused_parameters: bool, build: Callable[..., Any]) -> None:
    """With unused parameters to be found, DDP puts an autograd function of its own behind every output."""
    stock = build("Llama")
    patched = patch_model(copy.deepcopy(stock))
    results = []
    for model in (stock, patched):
        wrapped = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=find_unused_parameters)
        value = LOSSES[loss](wrapped)
        value.backward()
        results.append([value.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head_apart", [False, True])
@pytest.mark.parametrize("loss", ["labels", "own loss"])
@pytest.mark.usefixtures("nothing_materialises")
def test_fsdp2(loss: str, head_apart: bool, build: Callable[..., Any], fused_calls: list[Any]) -> None:
    """A head that is a unit of its own gives its weight back before the loss, and runs as stock."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    stock = build("Llama")
    patched = patch_model(copy.deepcopy(stock))
    results = []
    for model in (stock, patched):
        mesh = init_device_mesh("cpu", (1,))
        for part in (*model.model.layers, *([model.lm_head] if head_apart else []), model):
            fully_shard(part, mesh=mesh)
        value = LOSSES[loss](model)
        value.backward()
        results.append([value.detach(), *(p.grad.full_tensor() for p in model.parameters())])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
    assert len(fused_calls) == (not head_apart)
