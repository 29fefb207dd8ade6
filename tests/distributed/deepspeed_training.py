"""Functions that the processes of `test_deepspeed.py` run: training with DeepSpeed, stock and patched."""

from __future__ import annotations

import copy
import logging
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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

# Small weights are divided too. From the second step on, weights that are needed again soon stay gathered.
ZERO_3: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 10000}
FREED_AT_ONCE = {**ZERO_3, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}


def create_engine(model: Any, zero: dict[str, Any], accumulation: int = 1, **config: Any) -> Any:
    import deepspeed

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
) -> Any:
    """Train stock and patched with DeepSpeed and compare. Return the report and the warnings."""
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
    kinds = {w.category for w in caught} & {MaterializedLogitsWarning, NotFusedWarning}
    return flce.report(patched), {kind.__name__ for kind in kinds}


class _TwoOutputs(torch.nn.Module):
    """Model that returns the logits and a view of the logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        logits = self.model(input_ids=input_ids).logits
        return {"logits": logits, "last": logits[:, -1]}


def two_outputs() -> None:
    """Check that DeepSpeed's factor 1/4, which is in a hook of each output, is applied once."""
    norms: list[Tensor] = []
    stock = tiny_llama()
    for model in (stock, flce.patch_model(copy.deepcopy(stock))):
        model.lm_head.weight.register_hook(lambda grad: norms.append(grad.norm()))
        ids = batch(dist.get_rank(), 0)
        logits = create_engine(_TwoOutputs(model), {"stage": 1}, 4)(input_ids=ids)["logits"]
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    torch.testing.assert_close(norms[1], norms[0], rtol=rounding(1e-5), atol=0.0)


# ------------------------------------------------------------------------------------------------------- only ZeRO-3


def _stock_and_patched(zero: dict[str, Any]) -> list[Any]:
    stock = tiny_llama()
    return [
        create_engine(model, zero) for model in (stock, flce.patch_model(copy.deepcopy(stock), on_materialize="ignore"))
    ]


def _compare_steps(steps: Callable[[Any], list[float]], zero: dict[str, Any]) -> None:
    """Compare the numbers that `steps` returns for stock and patched."""
    stock, patched = _stock_and_patched(zero)
    expected, got = steps(stock), steps(patched)
    torch.testing.assert_close(got, expected, rtol=rounding(1e-5), atol=rounding(1e-5))
    assert len(set(expected)) > 1
    assert not flce.report(patched).stock


def late_reads(zero: dict[str, Any]) -> None:
    stock, patched = _stock_and_patched(zero)
    expected = stock(input_ids=batch(dist.get_rank(), 0)).logits.detach().clone()
    check_late_reads(patched, expected, patched.backward, patched.step)


def evaluated(zero: dict[str, Any]) -> None:
    """Train with an evaluation between the steps."""

    def steps(engine: Any) -> list[float]:
        numbers = []
        for step in range(STEPS):
            ids = batch(dist.get_rank(), step)
            engine.train()
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            engine.eval()
            with torch.inference_mode() if step % 2 else torch.no_grad():
                outputs = engine(input_ids=ids, labels=ids)
                numbers += [loss.item(), outputs.loss.item(), outputs.logits.exp().mean().log().item()]
        return numbers

    _compare_steps(steps, zero)


def targets_refused(zero: dict[str, Any]) -> None:
    """Train with some batches that raise an error because a target is out of range."""

    def steps(engine: Any) -> list[float]:
        losses = []
        for step in range(5):
            ids = batch(dist.get_rank(), step)
            labels = ids.masked_fill(ids == ids[0, 3], 10**6) if step in (0, 2, 3) else ids
            try:
                loss = engine(input_ids=ids, labels=labels).loss
            except IndexError:
                continue
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        assert len(losses) == 2
        return losses

    _compare_steps(steps, zero)


def ranks_apart(zero: dict[str, Any]) -> None:
    """Train with steps in which one process has no labels, or a loss of zero."""

    def steps(engine: Any) -> list[float]:
        losses = []
        for step in range(STEPS):
            ids = batch(dist.get_rank(), step)
            if dist.get_rank() == step % 2 and step < 2:
                loss = engine(input_ids=ids).logits.sum() * 0.0
            else:
                labels = ids.fill_(-100) if dist.get_rank() == step % 2 else ids
                loss = engine(input_ids=ids % 50, labels=labels, num_items_in_batch=torch.tensor(16)).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    _compare_steps(steps, zero)


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


def _loss_with_history(outputs: list[Any]) -> Callable[[Any, Tensor], Tensor]:
    """Return a loss that computes the logits again in backward, and stores the outputs of earlier steps."""

    def loss(model: Any, ids: Tensor) -> Tensor:
        outputs.append(model(input_ids=ids).logits)
        return (
            F.cross_entropy(outputs[-1][:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none").square().mean()
        )

    return loss


def gathered_heads(zero: dict[str, Any], frozen: bool) -> list[list[int]]:
    """Return the number of gathers of the head in each step, stock and patched. Two copies never exist at once."""
    counts: list[list[int]] = []
    for patched in (False, True):
        model = flce.patch_model(tiny_llama()) if patched else tiny_llama()
        model.lm_head.weight.requires_grad_(not frozen)
        engine, loss = create_engine(model, zero), _loss_with_history([])
        counts.append([])
        for step in range(STEPS):
            with _CountHeads(model.lm_head.weight) as heads:
                engine.backward(loss(engine, batch(dist.get_rank(), step)))
                engine.step()
            assert heads.most == 1
            counts[-1].append(heads.gathered)
    return counts


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


def checkpointed_head() -> list[str]:
    """Train with a checkpoint around the head. Return the reasons that the stock code runs."""
    losses = []
    for patched in (False, True):
        engine = create_engine(flce.patch_model(_Checkpointed()) if patched else _Checkpointed(), FREED_AT_ONCE)
        for step in range(2):
            loss = engine(batch(dist.get_rank(), step))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    torch.testing.assert_close(losses[2:], losses[:2], rtol=rounding(0.0), atol=0.0)
    return list(flce.report(engine).stock)


def trl_head() -> None:
    """Compare TRL's loss with flce's head with stock."""
    stock, patched = tiny_llama(), tiny_llama()
    add_trl_head(patched)
    results = [_train(create_engine(stock, FREED_AT_ONCE), LOSSES["labels"], False)]
    results.append(_train(create_engine(patched, FREED_AT_ONCE), trl_loss, False))
    _check_same(results[1], results[0])
    check_fused(patched)
