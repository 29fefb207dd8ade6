"""Tests of the losses for torchtitan and NeMo Automodel, with the code of both libraries on a CPU.

Their wheels are enough: `pip install --no-deps torchtitan==0.3.0 nemo_automodel==0.7.0`, and `spmd_types==0.2.3 tyro`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from demo import is_fused
from tests.processes import in_processes

PROCESSES = 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.lm_head = nn.Linear(8, 8), nn.Linear(8, 20, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def batch() -> tuple[Tensor, Tensor]:
    """Return the inputs and the labels of this process. Processes have unequal numbers of labels."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    labels = torch.randint(20, (2, 8), generator=generator)
    labels[0, : 3 + 4 * dist.get_rank()] = -100
    return torch.randn(2, 8, 8, generator=generator), labels


def sharded() -> Model:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = Model(), init_device_mesh("cpu", (PROCESSES,))
    for module in (model.body, model.lm_head, model):
        fully_shard(module, mesh=mesh)
    return model


def gradients(model: nn.Module) -> list[Tensor]:
    found: list[Any] = [parameter.grad for parameter in model.parameters()]
    return [gradient.full_tensor() for gradient in found]


def count_labels(labels: Tensor) -> Tensor:
    count = (labels != -100).sum()
    dist.all_reduce(count)
    return count


@in_processes(PROCESSES)
def test_torchtitan_s_loss() -> None:
    """Compare with torchtitan's loss in chunks: losses, gradients, and an evaluation. FSDP reduces the gradients."""
    pytest.importorskip("torchtitan.components.loss", reason="torchtitan 0.3 is not installed")
    from torchtitan.components.loss import ChunkedLossWrapper

    from torchtitan_loss import FlceLoss

    x, labels = batch()
    results = []
    for config in (ChunkedLossWrapper.Config(num_chunks=4), FlceLoss.Config()):
        model, wrapper = sharded(), config.build()
        wrapper.set_lm_head(model.lm_head)
        for _ in range(2):  # the second step uses the weight that the first one has sharded again
            model.zero_grad()
            loss, metrics = wrapper(model(x), labels, count_labels(labels))
            loss.backward()
        assert metrics == {}
        assert is_fused(loss) == isinstance(wrapper, FlceLoss)
        with torch.no_grad():
            evaluated, _ = wrapper(model(x), labels)
        assert type(model.lm_head.weight.data).__name__ == "DTensor"
        results.append([loss.detach(), evaluated, *gradients(model)])
    torch.testing.assert_close(results[1], results[0])
    with pytest.raises(TypeError, match=r"got \['advantages'\] too"):
        wrapper(x, labels, advantages=x)


@in_processes(PROCESSES)
def test_automodel_s_loss() -> None:
    """Compare with a loss of logits, through the function that Automodel's recipes call."""
    pytest.importorskip("nemo_automodel.components.loss.utils", reason="NeMo Automodel 0.7 is not installed")
    from nemo_automodel.components.loss import build_loss_config
    from nemo_automodel.components.loss.utils import calculate_loss

    from automodel_loss import FlceLinearCrossEntropy

    x, labels = batch()
    weights = torch.linspace(0.5, 2.0, labels.numel()).view(labels.shape)
    count = int(count_labels(labels))
    loss_fn = build_loss_config(FlceLinearCrossEntropy, logit_softcapping=2.0).build()
    model, stock = sharded(), Model()
    # Automodel multiplies the loss by the number of processes, because FSDP averages the gradients.
    hidden = model(x)
    loss = PROCESSES * calculate_loss(
        loss_fn, hidden_states=hidden, labels=labels, model=model, num_label_tokens=count,
        grad_reduce_group=dist.group.WORLD, loss_weights=weights,
    )  # fmt: skip
    assert is_fused(loss)
    loss.backward()
    logits = 2.0 * torch.tanh(stock.lm_head(stock(x)) / 2.0)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    expected = PROCESSES * (expected * weights.flatten()).sum() / count
    expected.backward()
    for parameter in stock.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= PROCESSES
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(model), [parameter.grad for parameter in stock.parameters()])
    weight = stock.lm_head.weight
    assert loss_fn(x, torch.full_like(labels, -100), weight, num_label_tokens=0).item() == 0.0
    in_half = loss_fn(x.bfloat16(), labels, weight, num_label_tokens=count)  # a head in float32
    torch.testing.assert_close(in_half, loss_fn(x.bfloat16().float(), labels, weight, num_label_tokens=count))
