"""What the processes of the tests with DeepSpeed run."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import flce
from flce.huggingface import MaterializedLogitsWarning, NotFusedWarning
from tests.distributed.training import LOSSES, STEPS, batch, tiny_llama, with_lora

# Nothing stays gathered because it is small; what is needed again soon does, from the third step on.
ZERO_3: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 10000}
FREED_AT_ONCE = {**ZERO_3, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}


def engine_of(model: Any, zero: dict[str, Any], accumulation: int = 1, **config: Any) -> Any:
    import deepspeed

    # Otherwise it compiles a collective in C++ for a minute, which nothing here depends on.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel(logging.ERROR)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **config,
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return engine


def _train(engine: Any, loss: str, direct: bool) -> tuple[list[float], list[Tensor], list[Tensor]]:
    """Losses, the gradients of the first step, and the weights after the last."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    stage, accumulation = engine.zero_optimization_stage(), engine.gradient_accumulation_steps()
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    losses, gradients = [], []
    for step in range(STEPS * accumulation):
        value = LOSSES[loss](engine, batch(dist.get_rank(), step))
        losses.append(value.item())
        if direct:
            value.backward()
        else:
            engine.backward(value)
        if step == accumulation - 1 and stage:
            gradients = [safe_get_full_grad(p).detach().clone() for p in trained]
        engine.step()
    weights = [safe_get_full_fp32_param(p) if stage else p for p in trained]
    return losses, gradients, [weight.detach().clone() for weight in weights]


def compare(
    zero: dict[str, Any],
    loss: str,
    accumulation: int = 1,
    direct: bool = False,
    prepare: Callable[[Any], Any] = lambda model: model,
    tolerance: float = 1e-5,
    tied: bool = False,
    **config: Any,
) -> Any:
    """Patched beside stock, both with DeepSpeed."""
    stock = prepare(tiny_llama(tie_word_embeddings=tied))
    patched = flce.patch_model(copy.deepcopy(stock))
    want = _train(engine_of(stock, zero, accumulation, **config), loss, direct)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = _train(engine_of(patched, zero, accumulation, **config), loss, direct)
    torch.testing.assert_close(got[0], want[0], rtol=tolerance, atol=tolerance)
    for mine, stocks in zip(got[1], want[1], strict=True):
        assert (mine - stocks).norm() <= tolerance * stocks.norm(), (mine, stocks)
    torch.testing.assert_close(got[2], want[2], rtol=20 * tolerance, atol=20 * tolerance)
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
        logits = engine_of(_TwoOutputs(model), {"stage": 1}, 4)(input_ids=ids)["logits"]
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    torch.testing.assert_close(norms[1], norms[0])
