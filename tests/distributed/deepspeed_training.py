"""What the processes of the tests with DeepSpeed run."""

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
    batch,
    error_of,
    rounding,
    shifted,
    smoothed,
    tiny_llama,
    with_lora,
)

# Nothing stays gathered because it is small; what is needed again soon does, from the second step on.
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


def _train(
    engine: Any, loss: Callable[[Any, Tensor], Tensor], direct: bool
) -> tuple[list[float], list[Tensor], list[Tensor]]:
    """Losses, the gradients of the first step, and the weights after the last."""
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


def _check_same(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    tolerance = rounding(tolerance)
    torch.testing.assert_close(got[0], want[0], rtol=tolerance, atol=tolerance)
    for mine, stocks in zip(got[1], want[1], strict=True):
        assert (mine - stocks).norm() <= tolerance * stocks.norm(), (mine, stocks)
    # AdamW divides by the size of a gradient, so rounding shows in weights whose gradients are next to nothing.
    torch.testing.assert_close(got[2], want[2], rtol=20 * tolerance, atol=20 * tolerance)
    assert want[0][-1] != want[0][0]


def _two_forwards(model: Any, ids: Tensor) -> Tensor:
    """Before one backward, several losses of each: one of the first forward is older than the second forward."""
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
    """Patched beside stock, both with DeepSpeed."""
    stock = tiny_llama(tie_word_embeddings=tied)
    stock = stock if adapters is None else with_lora(adapters)(stock)
    if checkpointing:
        stock.gradient_checkpointing_enable()
    patched = flce.patch_model(copy.deepcopy(stock))
    function = _two_forwards if loss == "two forwards" else LOSSES[loss]
    want = _train(engine_of(stock, zero, accumulation, **config), function, direct)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = _train(engine_of(patched, zero, accumulation, **config), function, direct)
    _check_same(got, want, tolerance)
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
    torch.testing.assert_close(norms[1], norms[0], rtol=rounding(1e-5), atol=0.0)


# ------------------------------------------------------------------------------------------------------- only ZeRO-3


def _stock_and_patched(zero: dict[str, Any]) -> list[Any]:
    stock = tiny_llama()
    return [
        engine_of(model, zero) for model in (stock, flce.patch_model(copy.deepcopy(stock), on_materialize="ignore"))
    ]


def _losses_of(steps: Callable[[Any], list[float]], zero: dict[str, Any]) -> None:
    """Losses and other numbers of a training, of stock and patched."""
    stock, patched = _stock_and_patched(zero)
    want, got = steps(stock), steps(patched)
    torch.testing.assert_close(got, want, rtol=rounding(1e-5), atol=rounding(1e-5))
    assert len(set(want)) > 1
    assert not flce.report(patched).stock


def late_reads(zero: dict[str, Any]) -> None:
    """Logits read after backward, and after the next forward, are stock's; after a step they are an error."""
    stock, patched = _stock_and_patched(zero)
    ids = batch(dist.get_rank(), 0)
    want = stock(input_ids=ids).logits.detach().clone()

    def trained() -> Tensor:
        outputs = patched(input_ids=ids, labels=ids)
        patched.backward(outputs.loss)
        logits: Tensor = outputs.logits
        return logits

    torch.testing.assert_close(trained().softmax(-1), want.softmax(-1))
    logits = trained()
    patched(input_ids=ids, labels=ids)
    assert torch.equal(logits.argmax(-1), want.argmax(-1))
    logits = trained()
    patched.step()
    error_of(lambda: logits.argmax(-1), "by an optimizer step")
    assert not torch.equal(patched(input_ids=ids, labels=ids).logits.argmax(-1), want.argmax(-1))


def evaluated(zero: dict[str, Any]) -> None:
    """An evaluation between the steps."""

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

    _losses_of(steps, zero)


def targets_refused(zero: dict[str, Any]) -> None:
    """Some batches have a target out of range, which raises; training goes on with the next."""

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

    _losses_of(steps, zero)


def ranks_apart(zero: dict[str, Any]) -> None:
    """In some steps one process has no labels, or only a zero of its logits in the place of a loss."""

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

    _losses_of(steps, zero)


class _CountHeads(TorchDispatchMode):
    """The most memories of a whole parameter that exist at a time, looked for at every operation."""

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


def _kept_outputs(kept: list[Any]) -> Callable[[Any, Tensor], Tensor]:
    """A loss whose backward makes the logits again, and which keeps the outputs of earlier steps."""

    def loss(model: Any, ids: Tensor) -> Tensor:
        kept.append(model(input_ids=ids).logits)
        return F.cross_entropy(kept[-1][:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none").square().mean()

    return loss


def gathered_heads(zero: dict[str, Any], frozen: bool) -> list[list[int]]:
    """How often stock and patched gather the head in each step. It is never there twice."""
    counts: list[list[int]] = []
    for patched in (False, True):
        model = flce.patch_model(tiny_llama()) if patched else tiny_llama()
        model.lm_head.weight.requires_grad_(not frozen)
        engine, loss = engine_of(model, zero), _kept_outputs([])
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
    """Why stock code runs."""
    losses = []
    for patched in (False, True):
        engine = engine_of(flce.patch_model(_Checkpointed()) if patched else _Checkpointed(), FREED_AT_ONCE)
        for step in range(2):
            loss = engine(batch(dist.get_rank(), step))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    torch.testing.assert_close(losses[2:], losses[:2], rtol=rounding(0.0), atol=0.0)
    return list(flce.report(engine).stock)


def of_trl() -> None:
    """TRL's loss with flce's head, beside the loss of stock."""
    from trl.trainer import utils

    import flce.huggingface.trl

    def loss_of_trl(model: Any, ids: Tensor) -> Tensor:
        made = model(input_ids=ids, labels=ids, fused_lm_head=True, summed=True)
        value: Tensor = -made.log_probs.sum() / made.label_mask.sum()
        return value

    stock, patched = tiny_llama(), tiny_llama()
    flce.huggingface.trl.make_add_fused_lm_head(utils.add_fused_lm_head, None)(patched, outputs=("entropy",))
    results = [_train(engine_of(stock, FREED_AT_ONCE), LOSSES["labels"], False)]
    results.append(_train(engine_of(patched, FREED_AT_ONCE), loss_of_trl, False))
    _check_same(results[1], results[0])
    report = flce.report(patched)
    assert report.fused == STEPS, report
    assert not report.stock, report
