"""Comparisons of patched and stock models with DeepSpeed in two processes."""

from __future__ import annotations

import copy
import logging
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")

import deepspeed

import flce
from flce.huggingface import MaterializedLogitsWarning, NotFusedWarning
from tests.distributed.training import (
    LOSSES,
    STEPS,
    add_trl_head,
    batch,
    check_fused,
    check_late_reads,
    rounding,
    shifted,
    smoothed,
    tiny_llama,
    trl_loss,
    with_lora,
)
from tests.processes import in_processes

# Small weights are divided too. From the second step on, weights that are needed again soon stay gathered.
ZERO_3: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 10000}
FREED_AT_ONCE = {**ZERO_3, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}


def create_engine(model: Any, zero: dict[str, Any], accumulation: int = 1, **config: Any) -> Any:
    # Otherwise DeepSpeed compiles a collective in C++ for a minute, which the tests do not need.
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


def _train(
    engine: Any, loss: Callable[[Any, Tensor], Tensor], direct: bool
) -> tuple[list[float], list[Tensor], list[Tensor]]:
    """Return the losses, the gradients of the first step, and the weights after the last step."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    stage, accumulation = engine.zero_optimization_stage(), engine.gradient_accumulation_steps()
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    losses, gradients = [], []
    for step in range(STEPS * accumulation):
        value = loss(engine, batch(dist.get_rank(), step))
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


def _check_same(got: Any, expected: Any, tolerance: float = 1e-5) -> None:
    tolerance = rounding(tolerance)
    torch.testing.assert_close(got[0], expected[0], rtol=tolerance, atol=tolerance)
    for ours, stocks in zip(got[1], expected[1], strict=True):
        assert (ours - stocks).norm() <= tolerance * stocks.norm(), (ours, stocks)
    # AdamW divides by the size of a gradient, which magnifies rounding in weights with tiny gradients.
    torch.testing.assert_close(got[2], expected[2], rtol=20 * tolerance, atol=20 * tolerance)
    assert expected[0][-1] != expected[0][0]


def _two_forwards(model: Any, ids: Tensor) -> Tensor:
    """Return the sum of losses of two forward passes. One loss is computed before the second forward pass."""
    logits = model(input_ids=ids).logits
    older = logits.logsumexp(-1).square().mean()
    return smoothed(model, ids.flip(0)) + F.cross_entropy(*shifted(logits, ids)) + older


def compare(
    zero: dict[str, Any],
    loss: str,
    accumulation: int = 1,
    direct: bool = False,
    adapters: str | None = None,
    tied: bool = False,
    checkpointing: bool = False,
    tolerance: float = 1e-5,
    **config: Any,
) -> None:
    """Train stock and patched with DeepSpeed and compare. ``direct``: ``loss.backward()``, scaled in hooks."""
    stock = tiny_llama(tie_word_embeddings=tied)
    stock = stock if adapters is None else with_lora(adapters)(stock)
    if checkpointing:
        stock.gradient_checkpointing_enable()
    patched = flce.patch_model(copy.deepcopy(stock))
    function = _two_forwards if loss == "two forwards" else LOSSES[loss]
    expected = _train(create_engine(stock, zero, accumulation, **config), function, direct)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = _train(create_engine(patched, zero, accumulation, **config), function, direct)
    _check_same(got, expected, tolerance)
    check_fused(patched, STEPS * accumulation)
    warned = any(issubclass(w.category, (MaterializedLogitsWarning, NotFusedWarning)) for w in caught)
    assert warned == bool(flce.report(patched).materialized) == (loss == "real logits")


@pytest.mark.parametrize(
    "stage, loss, direct",
    [(0, "own loss", False), (1, "labels", False), (1, "own loss", True), (2, "own loss", False), (2, "z-loss", True)],
)
@in_processes(2)
def test_zero_up_to_2_is_fused(stage, loss, direct):
    compare({"stage": stage}, loss, 2, direct)


OFFLOADED = FREED_AT_ONCE | {name: {"device": "cpu"} for name in ("offload_optimizer", "offload_param")}


@pytest.mark.parametrize(
    "zero, loss, config",
    [
        (ZERO_3, "labels", {"accumulation": 2, "direct": True, "gradient_clipping": 0.1, "checkpointing": True}),
        (FREED_AT_ONCE, "own loss", {"tied": True}),
        (FREED_AT_ONCE, "two forwards", {}),
        (FREED_AT_ONCE, "real logits", {}),
        (FREED_AT_ONCE, "smoothed", {"adapters": "head"}),
        (FREED_AT_ONCE, "frozen meanwhile", {"adapters": "modules_to_save"}),
        (OFFLOADED, "labels", {"adapters": "backbone"}),
        (OFFLOADED, "own loss", {}),
        (ZERO_3, "own loss", {"bf16": {"enabled": True}, "tolerance": 2e-2}),
    ],
)
@in_processes(2)
def test_zero_3_is_fused(zero, loss, config):
    compare(zero, loss, **config)


class _TwoOutputs(torch.nn.Module):
    """Model that returns the logits and a view of the logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        logits = self.model(input_ids=input_ids).logits
        return {"logits": logits, "last": logits[:, -1]}


@in_processes(2)
def test_two_outputs_of_one_head() -> None:
    """Check that DeepSpeed's factor 1/4, which is in a hook of each output, is applied once."""
    norms: list[Tensor] = []
    stock = tiny_llama()
    for model in (stock, flce.patch_model(copy.deepcopy(stock))):
        model.lm_head.weight.register_hook(lambda grad: norms.append(grad.norm()))
        ids = batch(dist.get_rank(), 0)
        logits = create_engine(_TwoOutputs(model), {"stage": 1}, 4)(input_ids=ids)["logits"]
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    torch.testing.assert_close(norms[1], norms[0], rtol=rounding(1e-5), atol=0.0)


def _stock_and_patched() -> list[Any]:
    stock = tiny_llama()
    models = stock, flce.patch_model(copy.deepcopy(stock), on_materialize="ignore")
    return [create_engine(model, FREED_AT_ONCE) for model in models]


@in_processes(2)
def test_late_reads() -> None:
    stock, patched = _stock_and_patched()
    expected = stock(input_ids=batch(dist.get_rank(), 0)).logits.detach().clone()
    check_late_reads(patched, expected, patched.backward, patched.step)


def _evaluated(engine: Any, step: int) -> list[float]:
    """Train with an evaluation after the step."""
    ids = batch(dist.get_rank(), step)
    engine.train()
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    engine.eval()
    with torch.inference_mode() if step % 2 else torch.no_grad():
        outputs = engine(input_ids=ids, labels=ids)
        return [loss.item(), outputs.loss.item(), outputs.logits.exp().mean().log().item()]


def _refused_targets(engine: Any, step: int) -> list[float]:
    """Train with some batches that raise an error because a target is out of range."""
    ids = batch(dist.get_rank(), step)
    labels = ids.masked_fill(ids == ids[0, 3], 10**6) if step in (0, 2, 3) else ids
    try:
        loss = engine(input_ids=ids, labels=labels).loss
    except IndexError:
        return []
    engine.backward(loss)
    engine.step()
    return [loss.item()]


def _ranks_apart(engine: Any, step: int) -> list[float]:
    """Train with steps in which one process has no labels, or a loss of zero."""
    ids, empty = batch(dist.get_rank(), step), dist.get_rank() == step % 2
    if empty and step < 2:
        loss = engine(input_ids=ids).logits.sum() * 0.0
    else:
        labels = ids.fill_(-100) if empty else ids
        loss = engine(input_ids=ids % 50, labels=labels, num_items_in_batch=torch.tensor(16)).loss
    engine.backward(loss)
    engine.step()
    return [loss.item()]


STOCKS_ERROR = pytest.mark.skipif(torch.cuda.is_available(), reason="stock's assertion on a GPU ends its process")


@pytest.mark.parametrize(
    "one_step, count", [(_evaluated, 9), pytest.param(_refused_targets, 2, marks=STOCKS_ERROR), (_ranks_apart, 3)]
)
@in_processes(2)
def test_steps_of_zero_3(one_step, count):
    """Compare the numbers of some steps of stock and of patched."""
    numbers = []
    for engine in (engines := _stock_and_patched()):
        numbers.append([number for step in range(5 if count == 2 else STEPS) for number in one_step(engine, step)])
    torch.testing.assert_close(numbers[1], numbers[0], rtol=rounding(1e-5), atol=rounding(1e-5))
    assert len(numbers[0]) == count
    assert len(set(numbers[0])) > 1
    assert not flce.report(engines[1]).stock


class _CountHeads(TorchDispatchMode):
    """Counter of the full copies of a parameter: the most at one time (`most`), and all (`gathered`)."""

    def __init__(self, parameter: Any) -> None:
        super().__init__()
        self._parameter = parameter
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self.most = 0
        self.gathered = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        storage = self._parameter.data.untyped_storage()
        if storage.nbytes() >= 4 * self._parameter.ds_numel:
            self.gathered += storage not in self._seen
            self._seen.add(storage)
        del storage
        self.most = max(self.most, len(self._seen))
        return result


@pytest.mark.parametrize("zero, frozen", [(ZERO_3, False), (FREED_AT_ONCE, True)])
@in_processes(2)
def test_zero_3_gathers_the_head_once(zero, frozen):
    """Check the gathers. DeepSpeed stores the gathered head until backward from the second step on. Two copies never
    exist at once. The loss computes the logits again in backward, and outputs of earlier steps are stored."""
    counts: list[list[int]] = []
    for patched in (False, True):
        model = flce.patch_model(tiny_llama()) if patched else tiny_llama()
        model.lm_head.weight.requires_grad_(not frozen)
        engine, outputs = create_engine(model, zero), []
        counts.append([])
        for step in range(STEPS):
            ids = batch(dist.get_rank(), step)
            with _CountHeads(model.lm_head.weight) as heads:
                outputs.append(engine(input_ids=ids).logits)
                losses = F.cross_entropy(*shifted(outputs[-1], ids), reduction="none")
                engine.backward(losses.square().mean())
                engine.step()
            assert heads.most == 1
            counts[-1].append(heads.gathered)
    more = [ours - stocks for stocks, ours in zip(*counts, strict=True)]
    assert more == ([1, 0, 0] if zero == ZERO_3 else [1, 1, 1])


class _Checkpointed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_llama()

    def forward(self, ids: Tensor) -> Tensor:
        def loss(hidden: Tensor) -> Tensor:
            logits = self.model.lm_head(hidden)
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

        hidden = self.model.model(input_ids=ids).last_hidden_state
        value: Tensor = torch.utils.checkpoint.checkpoint(loss, hidden, use_reentrant=False)
        return value


@in_processes(2)
def test_zero_3_with_a_checkpoint_around_the_head_runs_stock() -> None:
    losses = []
    for patched in (False, True):
        engine = create_engine(flce.patch_model(_Checkpointed()) if patched else _Checkpointed(), FREED_AT_ONCE)
        for step in range(2):
            loss = engine(batch(dist.get_rank(), step))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    torch.testing.assert_close(losses[2:], losses[:2], rtol=rounding(0.0), atol=0.0)
    (reason,) = flce.report(engine).stock
    assert "ZeRO-3 runs within torch.utils.checkpoint" in reason


@in_processes(2)
def test_a_head_of_trl() -> None:
    """Compare TRL's loss with flce's head with stock."""
    stock, patched = tiny_llama(), tiny_llama()
    add_trl_head(patched)
    results = [_train(create_engine(stock, FREED_AT_ONCE), LOSSES["labels"], False)]
    results.append(_train(create_engine(patched, FREED_AT_ONCE), trl_loss, False))
    _check_same(results[1], results[0])
    check_fused(patched)
