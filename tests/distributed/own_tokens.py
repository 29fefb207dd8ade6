"""Functions that `test_wrappers.py` runs in every process: each process has tokens of its own."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import flce
from tests.distributed.pipelines import LastStage
from tests.distributed.training import WRAPPINGS, V, batch, check_fused, device, gather_full, tiny_llama


def labels_of(rank: int) -> Tensor:
    """Return labels of which processes have different numbers, the last process none."""
    labels = batch(rank, 0)
    labels[:, 2 + 3 * rank :] = -100
    return labels.fill_(-100) if rank == dist.get_world_size() - 1 else labels


def check_gradients(model: Any, stock: Any) -> None:
    gradients = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    for name, parameter in stock.named_parameters():
        torch.testing.assert_close(gather_full(gradients[name]), parameter.grad, rtol=1e-4, atol=1e-6)


def sequences(wrapping: str) -> None:
    """Check a model whose processes have different sequences: data parallelism."""
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    stock = tiny_llama()
    model = WRAPPINGS[wrapping](flce.patch_model(copy.deepcopy(stock), on_materialize="raise"))
    ids, labels = torch.cat([batch(r, 0) for r in ranks]), torch.cat([labels_of(r) for r in ranks])
    expected = stock(input_ids=ids, labels=labels).loss
    expected.backward()
    mine = {"input_ids": batch(rank, 0), "labels": labels_of(rank)}
    num_items = flce.global_num_items(mine["labels"], shift=1)
    assert num_items.item() == (labels[:, 1:] != -100).sum().item()
    for train in (True, False):
        with torch.set_grad_enabled(train):
            loss = model.train(train)(**mine, num_items_in_batch=num_items / len(ranks)).loss
            mean = loss.detach() / len(ranks)
            dist.all_reduce(mean)
            torch.testing.assert_close(mean, expected.detach())
            if train:
                loss.backward()
                check_gradients(model, stock)
    check_fused(model, 2)


def pieces(wrapping: str) -> None:
    """Check a model whose processes have pieces of the same sequences, as with context parallelism: the labels are
    shifted before. Also the operator, and two micro-batches."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    stock = LastStage().to(device())
    model = WRAPPINGS[wrapping](flce.patch_model(copy.deepcopy(stock), on_materialize="raise"))
    hidden = torch.randn(2, 8 * size, 32, device=device())
    labels = torch.randint(97, (2, 8 * size), device=device())
    labels[:, 3:11] = labels[:, -8:] = -100
    shift_labels = F.pad(labels[:, 1:], (0, 1), value=-100)
    F.cross_entropy(stock(hidden).flatten(0, 1), shift_labels.flatten()).backward()
    x, y = (t.chunk(size, 1)[rank] for t in (hidden, shift_labels))
    num_items = flce.global_num_items([y[:1], y[1:]]) / size
    weight = stock.lm_head.weight.detach().clone().requires_grad_()
    features = stock.layer(x).tanh().detach()
    for k in range(2):
        logits = model(x[k : k + 1])
        (F.cross_entropy(logits.flatten(0, 1), y[k], reduction="sum") / num_items).backward()
        flce.fused_linear_cross_entropy(features[k], weight, y[k], reduction="sum", num_items=num_items).backward()
    check_gradients(model, stock)
    check_fused(model, 2)
    assert weight.grad is not None
    dist.all_reduce(weight.grad)
    torch.testing.assert_close(weight.grad / size, stock.lm_head.weight.grad, rtol=1e-4, atol=1e-6)


class AttentionModel(nn.Module):
    """Model of one attention, whose sequences context parallelism divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.projection = nn.Embedding(V, 128), nn.Linear(128, 3 * 128)
        self.lm_head = nn.Linear(128, V, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, ids: Tensor) -> Tensor:
        projected = self.projection(self.embedding(ids)).unflatten(-1, (3, 4, 32))
        query, key, value = (x.transpose(1, 2).contiguous() for x in projected.unbind(2))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        logits: Tensor = self.lm_head(attended.transpose(1, 2).flatten(2))
        return logits


def context_parallel() -> None:
    """Compare PyTorch's context parallelism with one process, for labels in few of the pieces."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel as divide
    from torch.nn.attention import SDPBackend, sdpa_kernel

    size = dist.get_world_size()
    torch.manual_seed(0)
    stock = AttentionModel().to(device(), torch.bfloat16)
    model = flce.patch_model(copy.deepcopy(stock), on_materialize="raise")
    ids = torch.randint(V, (2, 128 * size), device=device())
    shift_labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    shift_labels[:, : 100 * size] = -100
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        F.cross_entropy(stock(ids).flatten(0, 1).float(), shift_labels.flatten()).backward()
        mesh = init_device_mesh("cuda", (size,), mesh_dim_names=("cp",))
        with divide(mesh, buffers=[ids, shift_labels], buffer_seq_dims=[1, 1]):
            num_items = flce.global_num_items(shift_labels) / size
            loss = F.cross_entropy(model(ids).flatten(0, 1), shift_labels.flatten(), reduction="sum")
            (loss / num_items).backward()
    for got, expected in zip(model.parameters(), stock.parameters(), strict=True):
        assert got.grad is not None
        assert expected.grad is not None
        dist.all_reduce(got.grad)
        assert (got.grad / size - expected.grad).norm() <= 3e-2 * expected.grad.norm()
    check_fused(model, 1)
