"""`install`: the trainers of TRL compute their losses with flce instead of TRL's kernel. Called by users.

TRL replaces the ``forward`` of each model that it trains. With ``fused_lm_head=True`` this forward runs the model
without its head, and calls a kernel of TRL with the head's weight. With flce the model's stock (unpatched) forward runs
instead and returns lazy logits, which include all operations of the model between its hidden states and its logits.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch

from flce.core.log import find_caller
from flce.core.options import ChunkOptions
from flce.distillation import linear_divergence
from flce.huggingface.lazy import register_results, state_of
from flce.huggingface.lazy.divergences import divergence
from flce.huggingface.lazy.normal_form import NoLazyFormError, require_lazy
from flce.huggingface.patch import is_patched, lazy_logits, patch_model, report
from flce.huggingface.usage import NotFusedWarning
from flce.huggingface.wrappers import is_partitioned
from flce.ops.arguments import check_options
from flce.torch_ops import register_skipped_frames, skip_frame, skip_frame_and_callees

__all__ = ["install", "uninstall"]

_TRAINERS = ("sft", "dpo", "kto", "grpo", "rloo")
_FUNCTION, _METHOD = "add_fused_lm_head", "compute_loss"

_FIELDS = {
    "log_probs": "logprob",
    "entropy": "entropy",
    "log_sum_sq_probs": "lse",
    "mean_logits": "mean_logit",
    "is_top1": "correct",
}
"""Fields of TRL's output, and the results of `flce.linear_logprobs` from which they follow."""

_LOSS_ARGUMENTS = ("fused_lm_head", "labels", "shift_labels", "num_items_in_batch")
"""Arguments that are not passed to the model's stock forward."""

_originals: dict[tuple[Any, str], Any] = {}
"""TRL's replaced functions, by the module or class and the name in it."""


def install(*, options: ChunkOptions | None = None) -> None:
    """Compute the losses of TRL's SFT, DPO, KTO, GRPO, RLOO, distillation and GKD trainers with flce.

    Call `install` before you create a trainer (`SFTTrainer`, `DPOTrainer`, ..., `DistillationTrainer`, `GKDTrainer`).
    Losses, metrics and gradients equal TRL's, without logits in memory. `SFTTrainer` with ``loss_type="nll"`` computes
    three matrix products instead of four. The trainer's model is patched as by `flce.patch_model`. A second call
    replaces the options for trainers that are created later.

    If a head cannot be fused (a quantised head), TRL's kernel runs, with a `NotFusedWarning`.

    Args:
        options: ``flce.ChunkOptions``. Ignored tokens are dropped, unless ``skip_ignored=False``.

    Raises:
        ImportError: TRL is not installed, is older than 1.16, or has functions with other arguments than flce's.
        TypeError: ``options`` are not `flce.ChunkOptions`.
    """
    check_options(options)
    if importlib.util.find_spec("trl") is None:
        raise ImportError("flce.huggingface.trl.install() needs TRL, which is not installed: pip install 'trl>=1.16'")
    factories: dict[tuple[Any, str], Callable[[Any], Any]] = {}
    for name in _TRAINERS:
        module = importlib.import_module(f"trl.trainer.{name}_trainer")
        factories[module, _FUNCTION] = functools.partial(make_add_fused_lm_head, options=options)
    factories[importlib.import_module("trl.trainer.sft_trainer").SFTTrainer, _METHOD] = _make_compute_loss
    divergence = importlib.import_module("trl.trainer.distillation_trainer"), "ChunkedDivergenceFunction"
    factories[divergence] = functools.partial(_make_divergence_function, options=options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of TRL's, that the module is experimental
        gkd = importlib.import_module("trl.experimental.gkd.gkd_trainer").GKDTrainer
    factories[gkd, _METHOD] = functools.partial(_make_gkd_compute_loss, options=options)
    factories[gkd, "generalized_jsd_loss"] = _make_generalized_jsd_loss
    originals = {place: _originals.get(place) or inspect.getattr_static(*place, None) for place in factories}
    replacements = {place: factories[place](stock) for place, stock in originals.items()}
    for place, stock in originals.items():
        _check_signature(place, stock, replacements[place])
    _originals.update(originals)
    for (namespace, name), function in replacements.items():
        setattr(namespace, name, function)


def uninstall() -> None:
    """Undo `install` for trainers that are created later. Without `install`, this call has no effect."""
    while _originals:
        (namespace, name), stock = _originals.popitem()
        setattr(namespace, name, stock)


def _check_signature(place: tuple[Any, str], stock: Any, replacement: Any) -> None:
    """Raise ImportError if TRL's function has other arguments than its replacement."""
    trl = importlib.import_module("trl")
    name = f"{place[0].__name__}.{place[1]}"
    if stock is None:
        raise ImportError(f"flce needs TRL 1.16 or newer: TRL {trl.__version__} has no {name}")
    if isinstance(stock, type):  # an autograd.Function, whose forward has a context before the arguments of apply
        theirs, ours = f"{[*inspect.signature(stock.forward).parameters][1:]}", f"{_DIVERGENCE_ARGUMENTS}"  # type: ignore[attr-defined]
    else:
        theirs, ours = (
            f"{inspect.Signature([p.replace(annotation=p.empty) for p in inspect.signature(each).parameters.values()])}"
            for each in (stock, replacement)
        )
    if theirs != ours:
        raise ImportError(f"flce replaces {name}{ours}, but TRL {trl.__version__} has {name}{theirs}")


# ------------------------------------------------------------------------------------------------- the model's forward


def make_add_fused_lm_head(stock: Any, options: ChunkOptions | None) -> Callable[..., None]:
    def add_fused_lm_head(
        model: Any,
        temperature: float = 1.0,
        cast_lm_head_to_fp32: bool = False,
        outputs: tuple[str, ...] = ("log_probs",),
    ) -> None:
        """Replace the forward of ``model`` as TRL's function of this name does, but with flce's kernels."""
        reason = None
        try:
            if not is_patched(model):
                patch_model(model, options=options)
        except TypeError as error:
            reason = f"{error}"
        stock(model, temperature, cast_lm_head_to_fp32, outputs)
        if reason is not None:
            _warn_stock(reason)
            return
        head = _FusedHead(model.forward, temperature, cast_lm_head_to_fp32, ("log_probs", *outputs), options)

        @skip_frame
        @functools.wraps(type(model).forward)  # `generate` reads the signature of forward
        def forward(self: Any, *args: Any, summed: bool = False, **kwargs: Any) -> Any:
            if kwargs.get("fused_lm_head"):
                return head.run(self, args, kwargs, summed)
            if summed:  # an argument of the loss
                kwargs.pop("num_items_in_batch")
            return head.stock(*args, **kwargs)

        register_skipped_frames()
        model.forward = MethodType(forward, model)
        model._flce_can_sum = True

    return add_fused_lm_head


def _warn_stock(reason: str) -> None:
    find_caller().warn(f"TRL's own kernel computes the loss of this model, not flce: {reason}", NotFusedWarning)


@dataclass
class _FusedHead:
    """The forward of a model with ``fused_lm_head=True``, with arguments of TRL's ``add_fused_lm_head``."""

    stock: Callable[..., Any]
    """TRL's forward."""
    temperature: float
    in_float32: bool
    outputs: tuple[str, ...]
    options: ChunkOptions | None
    is_fusable: bool = True
    """False after a call whose head has returned ordinary logits."""

    @skip_frame
    def run(self, model: Any, args: Any, kwargs: dict[str, Any], summed: bool) -> Any:
        """Run the model and return TRL's ``FusedCausalLMOutput``. If ``summed``, log-probabilities are summed."""
        if not self.is_fusable or not is_patched(model):
            return self.stock(*args, **kwargs)
        inputs = {name: value for name, value in kwargs.items() if name not in _LOSS_ARGUMENTS}
        if getattr(model.config.get_text_config(), "output_router_logits", False):
            inputs.setdefault("output_router_logits", True)
        with lazy_logits(model):
            outputs = self.stock(*args, **{**inputs, "use_cache": False})
        output = self._fused_output(model, outputs, summed, **{name: kwargs.get(name) for name in _LOSS_ARGUMENTS[1:]})
        return self.stock(*args, **kwargs) if output is None else output

    @skip_frame_and_callees
    def _fused_output(
        self, model: Any, outputs: Any, summed: bool, labels: Any, shift_labels: Any, num_items_in_batch: Any
    ) -> Any:
        """Compute TRL's output from the model's output, or return None if the model has returned ordinary logits."""
        from trl.trainer.utils import FusedCausalLMOutput

        state = state_of(outputs.logits)
        if state is None:
            self.is_fusable = False
            _warn_stock("; ".join(report(model).stock) or "its head has computed real logits")
            return None
        shift = 1 if shift_labels is None else 0
        labels = (labels if shift_labels is None else shift_labels).to(state.product_device)
        mask = labels[:, shift:] != -100
        count = mask.sum() if num_items_in_batch is None else torch.as_tensor(num_items_in_batch, device=mask.device)
        count = count.clamp(min=1)
        options = _without_ignored(self.options or state.settings.options)
        state = replace(state, settings=replace(state.settings, options=options))
        state = state.in_float32() if self.in_float32 else state
        arguments: dict[str, Any] = {"shift": shift, "temperature": self.temperature}
        with state.gathered_weights():
            if summed:  # only the sum of the log-probabilities has a gradient
                arguments |= {"reduction": "sum", "num_items": count, "stats": ("entropy", "correct")}
                sums = state.fused_loss(labels, **arguments)
                # TRL divides the log-probabilities by `count`, and the loss is divided already.
                fields = {"log_probs": -sums.loss * count, "entropy": sums.entropy, "is_top1": sums.correct}
            else:
                names = {name: _FIELDS[name] for name in self.outputs}
                results = state.token_results(*names.values(), target=labels, **arguments)
                values: dict[str, Any] = {name: getattr(results, ours) for name, ours in names.items()}
                if "log_sum_sq_probs" in values:  # lse(2 z) - 2 lse(z)
                    with torch.no_grad():
                        arguments["temperature"] = self.temperature / 2.0
                        of_doubled: Any = state.token_results("lse", target=labels, **arguments).lse
                        values["log_sum_sq_probs"] = of_doubled - 2.0 * values["log_sum_sq_probs"]
                fields = {name: value[:, : labels.shape[1] - shift] for name, value in values.items()}
        register_results(state, fields.values())
        loss = -fields["log_probs"].sum() / count
        aux_loss = outputs.get("aux_loss")
        if aux_loss is not None:
            loss = loss + getattr(model.config.get_text_config(), "router_aux_loss_coef", 0.0) * aux_loss
        return FusedCausalLMOutput(loss=loss, label_mask=mask, aux_loss=aux_loss, **fields)


# ------------------------------------------------------------------------------------------------- SFTTrainer's loss


def _make_compute_loss(stock: Any) -> Callable[..., Any]:
    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Call TRL's method. If TRL only sums the log-probabilities, the model computes the sum."""
        own = self.args.loss_type == "nll" and self.compute_loss_func is None and self.label_smoother is None
        if own and getattr(self.model, "_flce_can_sum", False):
            model = functools.partial(model, summed=True, num_items_in_batch=num_items_in_batch)
        return stock(self, model, inputs, return_outputs, num_items_in_batch)

    return compute_loss


# ------------------------------------------------------------------------------------------------- distillation


def _without_ignored(options: ChunkOptions | None) -> ChunkOptions:
    """Return the options with which ignored tokens are dropped, unless the user has set ``skip_ignored``."""
    options = options or ChunkOptions()
    return replace(options, skip_ignored=True) if options.skip_ignored == "auto" else options


_DIVERGENCE_ARGUMENTS = [
    "student_hidden", "student_weight", "student_bias", "teacher_hidden", "teacher_weight", "teacher_bias", "beta",
    "temperature", "student_logit_scale", "student_final_logit_softcapping", "teacher_logit_scale",
    "teacher_final_logit_softcapping",
]  # fmt: skip
"""Arguments of TRL's `ChunkedDivergenceFunction`."""


def _make_divergence_function(stock: Any, options: ChunkOptions | None) -> Any:
    class FusedDivergence:
        """Replacement of TRL's ``autograd.Function``. `apply` returns the divergence and the entropy of each token."""

        @staticmethod
        def apply(*args: Any) -> Any:
            names = [name.replace("final_logit_softcapping", "softcap") for name in _DIVERGENCE_ARGUMENTS]
            given = dict(zip([name.removesuffix("_hidden") for name in names], args, strict=False))
            for model in ("student", "teacher"):
                if is_partitioned(given[f"{model}_weight"]):
                    _warn_stock("ZeRO-3 has partitioned a head, and TRL's kernel gathers it")
                    return stock.apply(*args)
                # Under autocast both are cast later. Otherwise TRL computes in the dtype of the hidden states.
                given[f"{model}_weight"] = given[f"{model}_weight"].to(given[model].dtype)
            out = linear_divergence(**given, kind="jsd", outputs=("divergence", "entropy"), options=options)
            assert out.entropy is not None
            return out.divergence, out.entropy.detach()

    return FusedDivergence


def _make_gkd_compute_loss(stock: Any, options: ChunkOptions | None) -> Callable[..., Any]:
    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Call TRL's method with a patched student and a patched teacher, whose logits are lazy."""
        student, teacher = map(self.accelerator.unwrap_model, (model, self.teacher_model))
        try:
            for each in (student, teacher):
                if not is_patched(each):
                    patch_model(each, options=options)
        except TypeError as error:
            _warn_stock(f"{error}")
        with lazy_logits(teacher) if is_patched(teacher) else contextlib.nullcontext():
            return stock(self, model, inputs, return_outputs, num_items_in_batch)

    return compute_loss


def _make_generalized_jsd_loss(stock: Any) -> Any:
    @staticmethod  # type: ignore[misc]
    def generalized_jsd_loss(
        student_logits: Any, teacher_logits: Any, labels: Any = None, beta: float = 0.5, temperature: float = 1.0,
        reduction: str = "batchmean", num_items_in_batch: Any = None,
    ) -> Any:  # fmt: skip
        """Compute TRL's loss from lazy logits; call TRL's function for other logits and reductions."""
        student: Any = state_of(student_logits)
        teacher: Any = state_of(teacher_logits)
        try:
            require_lazy(student is not None and teacher is not None and student.shape == teacher.shape)
            require_lazy(num_items_in_batch is not None or reduction in ("batchmean", "sum"))
            options = _without_ignored(student.token_options)
            values = divergence(student, teacher, labels, options, kind="jsd", beta=beta, temperature=temperature)
        except NoLazyFormError:
            return stock(student_logits, teacher_logits, labels, beta, temperature, reduction, num_items_in_batch)
        register_results(student, (values,))
        count: Any = torch.as_tensor(1 if num_items_in_batch is None else num_items_in_batch, device=values.device)
        if num_items_in_batch is None and reduction == "batchmean":
            count = max(len(values), 1) if labels is None else (labels != -100).sum().clamp_min(1)
        return values.sum() / count

    return generalized_jsd_loss
