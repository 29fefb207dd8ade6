"""``FlceCallback``: a Transformers ``Trainer`` whose model is patched, for those who never touch the model."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback

from flce.core.numbers import check_bool
from flce.core.options import ChunkOptions
from flce.huggingface.lazy.state import OnMaterialize
from flce.huggingface.patch import check_on_materialize, patch_model, unpatch_model, usages_of
from flce.ops.arguments import check_options


class FlceCallback(TrainerCallback):
    """Applies `flce.patch_model` to the model of a ``Trainer``.

    ``Trainer(model, args, callbacks=[FlceCallback()])`` is all that is needed. The model is patched when the
    trainer has been made, so that ``evaluate()`` and ``predict()`` without ``train()`` have the fused loss
    too, and again when training begins: by then ``model_init`` may have made another model. Whatever the trainer
    does to the model in between (adapters, compilation, mixed precision, sharding) finds it as it would be had
    ``patch_model`` been called by hand.

    The model stays patched: evaluation after training is fused too, and saving and generating do not change.

    Args:
        options: ``flce.ChunkOptions`` for the fused loss, see `flce.patch_model`.
        on_materialize: what happens where something reads the logits, see `flce.patch_model`.
        unpatch: restore the stock model when training ends.

    Raises:
        TypeError: `options` or `unpatch` has the wrong type; (from ``Trainer``) the model cannot be patched, see
            `flce.patch_model`.
        ValueError: another `on_materialize`.
    """

    def __init__(
        self,
        *,
        options: ChunkOptions | None = None,
        on_materialize: OnMaterialize = "warn",
        unpatch: bool = False,
    ) -> None:
        check_options(options)
        check_on_materialize(on_materialize)
        check_bool("unpatch", unpatch)
        self.options = options
        self.on_materialize = on_materialize
        self.unpatch = unpatch

    def on_init_end(self, args: Any, state: Any, control: Any, *, model: nn.Module | None = None, **_: Any) -> None:
        if model is not None:
            patch_model(model, options=self.options, on_materialize=self.on_materialize)

    on_train_begin = on_init_end

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: nn.Module | None = None, **_: Any) -> None:
        """Says, after the first step, if the trainer's loss does not go through flce."""
        for usage in [] if model is None else usages_of(model):
            usage.warn_if_not_fused()

    def on_train_end(self, args: Any, state: Any, control: Any, *, model: nn.Module | None = None, **_: Any) -> None:
        if self.unpatch and model is not None:
            unpatch_model(model)
