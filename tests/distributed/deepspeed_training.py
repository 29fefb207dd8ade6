"""What the processes of the tests with DeepSpeed run."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import flce
from flce.huggingface import MaterializedLogitsWarning, NotFusedWarning
from tests.distributed.training import LOSSES, STEPS, batch, tiny_llama


def _engine(model: Any, stage: int, accumulation: int) -> Any:
    import deepspeed

    # Otherwise it compiles a collective in C++ for a minute, which nothing here depends on.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return engine


def _train(model: Any, loss: str, stage: int, accumulation: int, direct: bool) -> tuple[list[float], list[Tensor]]:
    """Losses, and the weights after the last step."""
    from deepspeed.utils import safe_get_full_fp32_param

    engine = _engine(model, stage, accumulation)
    losses = []
    for step in range(STEPS * accumulation):
        value = LOSSES[loss](engine, batch(dist.get_rank(), step))
        losses.append(value.item())
        if direct:
            value.backward()
        else:
            engine.backward(value)
        engine.step()
    weights = [safe_get_full_fp32_param(p) if stage else p for p in model.parameters()]
    return losses, [weight.detach().clone() for weight in weights]


def compare(stage: int, loss: str, accumulation: int, direct: bool) -> Any:
    """Patched beside stock, both with DeepSpeed."""
    stock = tiny_llama()
    patched = flce.patch_model(copy.deepcopy(stock))
    want = _train(stock, loss, stage, accumulation, direct)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = _train(patched, loss, stage, accumulation, direct)
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1], want[1], rtol=2e-4, atol=2e-4)
    assert want[0][-1] != want[0][0]
    kinds = {w.category for w in caught} & {MaterializedLogitsWarning, NotFusedWarning}
    return flce.report(patched), {kind.__name__ for kind in kinds}


class _TwoOutputs(torch.nn.Module):
    """Returns the logits, and a view of them."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        logits = self.model(input_ids=input_ids).logits
        return {"logits": logits, "last": logits[:, -1]}


def two_outputs() -> None:
    """DeepSpeed's factor 1/4 is in a hook of each output, and reaches the gradient once."""
    norms: list[Tensor] = []
    stock = tiny_llama()
    for model in (stock, flce.patch_model(copy.deepcopy(stock))):
        model.lm_head.weight.register_hook(lambda grad: norms.append(grad.norm()))
        ids = batch(dist.get_rank(), 0)
        logits = _engine(_TwoOutputs(model), 1, 4)(input_ids=ids)["logits"]
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    torch.testing.assert_close(norms[1], norms[0])
