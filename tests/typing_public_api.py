"""Uses of the public API for type checkers: strict mypy (`make lint`) and pyright (test_typing.py) find no error.

This file is never run.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import assert_type

import flce


def training_step(hidden: Tensor, head: Tensor, target: Tensor) -> float:
    """Use the loss as a tensor without a cast or isinstance."""
    loss = flce.fused_linear_cross_entropy(hidden, head, target)
    loss.backward()
    return loss.item()


def arguments(hidden: Tensor, head: Tensor, target: Tensor, logits: Tensor) -> None:
    """Check that arguments other than `stats` do not change the return type."""
    options = flce.ChunkOptions(max_workspace_bytes=256 << 20, strategy="vocab")
    loss = flce.fused_linear_cross_entropy(
        hidden,
        head,
        target,
        linear_bias=None,
        adapters=[(hidden, head)],
        weight=None,
        reduction="sum",
        ignore_index=None,
        label_smoothing=0.1,
        softcap=30,
        logit_scale=2.0,
        temperature=0.5,
        z_loss=1e-4,
        token_weight=target.float(),
        num_items=target.sum(),
        shift=1,
        stats=(),
        options=options,
    )
    assert_type(loss, Tensor)
    loss = flce.cross_entropy(
        logits,
        target,
        None,
        ignore_index=0,
        reduction="sum",
        label_smoothing=0.1,
        softcap=30.0,
        logit_scale=2.0,
        temperature=0.5,
        z_loss=1e-4,
        token_weight=None,
        num_items=7,
        shift=1,
        stats=(),
        inplace=True,
        process_group=None,
        vocab_size=None,
    )
    assert_type(loss, Tensor)
    assert_type(flce.cross_entropy(logits, target, weight=head[:, 0]), Tensor)


def statistics(hidden: Tensor, head: Tensor, target: Tensor, stats: tuple[str, ...]) -> None:
    """Check that `stats` returns a named tuple. For a tuple of unknown length the type is a union."""
    out = flce.fused_linear_cross_entropy(hidden, head, target, stats=("lse", "correct"), shift=1)
    assert_type(out, flce.LinearCrossEntropyOutput)
    out.loss.backward()
    assert_type(out.lse, Tensor | None)
    assert_type(flce.cross_entropy(hidden, target, stats=("entropy",)), flce.LinearCrossEntropyOutput)
    either = flce.fused_linear_cross_entropy(hidden, head, target, stats=stats)
    assert_type(either, Tensor | flce.LinearCrossEntropyOutput)
    loss = either if isinstance(either, Tensor) else either.loss
    loss.backward()


def mistakes(hidden: Tensor, head: Tensor, target: Tensor) -> None:
    """Check that each wrong call is an error: both checkers report an ignore comment without an error."""
    flce.fused_linear_cross_entropy(hidden, head, target, shift="1")  # type: ignore[call-overload]
    flce.fused_linear_cross_entropy(hidden, head, target, smoothing=0.1)  # type: ignore[call-overload]
    flce.cross_entropy(hidden, target, inplace=None)  # type: ignore[call-overload]
    flce.cross_entropy(hidden, target, stats=["lse"])  # type: ignore[call-overload]
    flce.FusedLinearCrossEntropyLoss(smoothing=0.1)  # type: ignore[call-arg]
    flce.LinearCrossEntropyLoss(64, 1000, shift="1")  # type: ignore[arg-type]
    flce.CrossEntropyLoss(options=None)  # type: ignore[call-arg]


def modules(hidden: Tensor, target: Tensor) -> None:
    """Use modules without a cast: PyTorch gives their calls the type Any."""
    module = flce.LinearCrossEntropyLoss(64, 1000, shift=1, softcap=30.0, dtype=torch.bfloat16)
    loss: Tensor = module(hidden, target)
    loss.backward()
    other: Tensor = flce.FusedLinearCrossEntropyLoss(reduction="sum")(hidden, module.linear.weight, target, num_items=7)
    of_logits: Tensor = flce.CrossEntropyLoss(inplace=True)(hidden, target)
    (other + of_logits).backward()


def the_rest(logits: Tensor, model: torch.nn.Module) -> None:
    """Check plans, softmax and patched models."""
    plan = flce.plan(8192, 4096, 128256, torch.bfloat16, device="cuda", options=flce.ChunkOptions())
    assert_type(plan, flce.ChunkPlan)
    assert_type(plan.workspace_bytes, int)
    assert_type(flce.softmax(logits, -1), Tensor)
    assert_type(flce.log_softmax(logits, -1, dtype=torch.float32), Tensor)
    assert_type(flce.patch_model(model), torch.nn.Module)
    assert_type(flce.is_patched(model), bool)
    flce.report(model)
    flce.unpatch_model(model)
