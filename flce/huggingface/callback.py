"""``FlceCallback``: patches the model of a Transformers ``Trainer``. Public; imported on first use."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn
from transformers import TrainerCallback
from transformers.training_args import ParallelMode

from flce.core.options import ChunkOptions
from flce.huggingface.lazy.state import OnMaterialize, Settings
from flce.huggingface.patch import is_patched, patch_model, usages_of
from flce.ops.gradient_accumulation import check_parameters


class FlceCallback(TrainerCallback):
    """A callback that applies `flce.patch_model` to the model of a ``Trainer``.

    Pass it to the trainer: ``Trainer(model, args, callbacks=[FlceCallback()])``. The callback patches the model at the
    end of the trainer's constructor, so that ``evaluate()`` and ``predict()`` without ``train()`` compute the fused
    loss too. It patches again when training begins, because ``model_init`` may have created another model. Adapters,
    compilation, mixed precision and sharding of the trainer work as after a call of ``patch_model``.

    The model stays patched, until you call `flce.unpatch_model`. Evaluation after training is fused too. Saving and
    generating do not change.

    If the trainer accumulates gradients in one process, backward adds the gradient of the head to its ``.grad``
    (``ChunkOptions.gradient_accumulation_fusion``), without a second matrix of V x H. Otherwise autograd adds it: with
    ``torch_compile``, for a head with hooks of its gradient, or with `options`.

    Args:
        options: ``flce.ChunkOptions`` for the fused loss, see `flce.patch_model`. They are used as given.
        on_materialize, empty_loss: see `flce.patch_model`.

    Raises:
        TypeError: `options` has the wrong type; (from ``Trainer``) the model cannot be patched, see `flce.patch_model`.
        ValueError: `on_materialize` or `empty_loss` is not one of the options of `flce.patch_model`.
    """

    def __init__(
        self,
        *,
        options: ChunkOptions | None = None,
        on_materialize: OnMaterialize = "warn",
        empty_loss: str = "nan",
    ) -> None:
        self.settings = Settings(options, on_materialize, empty_loss)

    def on_init_end(self, args: Any, state: Any, control: Any, *, model: nn.Module | None = None, **_: Any) -> None:
        if model is None:
            return
        patch_model(model, **vars(self.settings))
        accumulates = args.gradient_accumulation_steps > 1 and args.parallel_mode is ParallelMode.NOT_PARALLEL
        if accumulates and self.settings.options is None and not args.torch_compile:
            heads = [module for module in model.modules() if isinstance(module, nn.Linear) and is_patched(module)]
            with contextlib.suppress(ValueError):  # heads to whose gradients dW cannot be added
                check_parameters([("a head", head.weight) for head in heads])
                options = ChunkOptions(gradient_accumulation_fusion=True)
                patch_model(model, **{**vars(self.settings), "options": options})

    on_train_begin = on_init_end

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: nn.Module | None = None, **_: Any) -> None:
        """Warn if flce does not compute the trainer's loss. The first step shows this."""
        for usage in [] if model is None else usages_of(model):
            usage.warn_if_not_fused()
