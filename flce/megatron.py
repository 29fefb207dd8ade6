"""Losses and log-probabilities of Megatron-Core's `GPTModel`, whose head tensor parallelism divides, without logits.

Megatron's own code of the model runs. Only the matrix product of the output layer is replaced: it returns lazy logits
of this process's classes, as Megatron's logits have. `compute_language_model_loss`, `vocab_parallel_logprobs` and
`vocab_parallel_entropy` compute results over the classes of all processes from them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel, gpt_model
from megatron.core.tensor_parallel import ColumnParallelLinear, mappings
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region as gather_tokens
from megatron.core.transformer.multi_token_prediction import roll_tensor
from torch import Tensor

from flce.core.options import DEFAULT_OPTIONS, ChunkOptions
from flce.core.problem import LinearLogprobsOutput
from flce.functional import cross_entropy
from flce.huggingface.divided_head import HeadDivision
from flce.huggingface.head_call import HeadCall, optimizer_steps, reason_not_lazy
from flce.huggingface.lazy import is_lazy, make_lazy, register_results, state_of
from flce.huggingface.lazy.normal_form import NoLazyFormError, NormalForm, require_lazy
from flce.huggingface.lazy.state import LazyState, Settings, head_state
from flce.huggingface.usage import Usage
from flce.ops.arguments import check_options

__all__ = [
    "FlceGPTModel",
    "install",
    "output_processor",
    "uninstall",
    "vocab_parallel_entropy",
    "vocab_parallel_logprobs",
]


@dataclass(frozen=True)
class _ShardDivision(HeadDivision):
    """Division of the classes over tensor-parallel processes. `vocab_size` is the number of classes of this process.

    Attributes:
        group: the processes, which have equal numbers of classes.
        has_token_shares: whether the hidden states are this process's share of the tokens (sequence parallelism).
        depths: the losses of a call of a model with MTP layers.
    """

    group: Any = None
    has_token_shares: bool = False
    depths: _Depths | None = field(default=None, compare=False, repr=False)

    @property
    def group_arguments(self) -> dict[str, Any]:
        if self.group.size() == 1:
            return {}
        vocab_size = self.vocab_size * self.group.size()
        return {"process_group": self.group, "vocab_size": vocab_size, "sequence_parallel": self.has_token_shares}

    def merge_classes(self, local: Tensor) -> Tensor:
        return local

    def sum_gradient(self, hidden: Tensor) -> Tensor:
        """Return the hidden states of all tokens, for the product with this process's classes."""
        prepare = gather_tokens if self.has_token_shares else mappings.copy_to_tensor_model_parallel_region
        return prepare(hidden, group=self.group)

    def local_classes(self, index: Tensor) -> Any:
        raise NoLazyFormError


class _ShardState(LazyState):
    """State of lazy logits of one process's classes. Operations are operations on the logits of these classes."""

    division: _ShardDivision

    @property
    def shape(self) -> torch.Size:
        shape, division = super().shape, self.division
        return torch.Size((shape[0] * division.group.size(), *shape[1:])) if division.has_token_shares else shape

    def with_hidden(self, function: Callable[[Tensor], Tensor]) -> LazyState:
        require_lazy(not self.division.has_token_shares)  # the function expects the hidden states of all tokens
        return super().with_hidden(function)

    def _call_operator(self, *args: Any, **kwargs: Any) -> Any:
        raise NoLazyFormError

    def results(
        self, labels: Tensor | None, outputs: Sequence[str], group: Any = None, temperature: float = 1.0
    ) -> list[Tensor]:
        """Return results of each token, over the classes of all processes: the loss, or `outputs` of
        `flce.linear_logprobs`."""
        # With token shares, flce gathers the first dimension of (S / processes * B, H).
        tokens = LazyState.with_hidden(self, lambda x: x.reshape(-1, x.shape[-1]))
        division = replace(self.division, group=group or self.division.group)
        state = LazyState(**{**vars(tokens), "division": division})
        # Megatron's training loops mask the losses of negative labels.
        target: Any = None if labels is None else labels.where(labels >= 0, -100).reshape(-1)
        with state.gathered_weights():
            if outputs == ["loss"]:
                results = [state.fused_loss(target, reduction="none")]
            else:
                out = state.token_results(*outputs, target=target, temperature=temperature)
                results = [getattr(out, name) for name in outputs]
        register_results(state, results)
        return [result.view(self.shape[:-1]) for result in results]


class _Depths:
    """Losses of a model and of its MTP layers, computed in one call when Megatron needs the first of them.

    Megatron computes the loss of each MTP layer from labels that it rolls, and then the loss of the model. In backward,
    nodes of the model's hidden states (`MTPLossAutoScaler`) start the gradients of the other losses.
    """

    def __init__(
        self, model: Any, *, hidden_states: Tensor, labels: Tensor, packed_seq_params: Any = None, **others: Any
    ) -> None:
        packing = {} if packed_seq_params is None else {"packed_seq_params": packed_seq_params}
        rolled = [labels]
        for _ in range(model.config.mtp_num_layers):
            rolled.append(roll_tensor(rolled[-1].clone(), cp_group=model.cp_group, **packing)[0])
        self.labels = torch.stack(rolled).transpose(1, 2)  # (depths, S, B)
        self.hidden = hidden_states  # of all depths
        self.remaining: list[Any] = []

    def set_hidden(self, mtp: Any, arguments: Any, hidden: Tensor) -> None:
        self.hidden = hidden

    def next_loss(self, state: _ShardState, labels: Tensor) -> Tensor:
        """Return the losses (S, B) of the next MTP layer or, at last, of the model."""
        if not self.remaining:
            division = state.division
            # Each process has its share of the tokens of every depth.
            processes = division.group.size() if division.has_token_shares else 1
            shares = self.labels.unflatten(1, (processes, -1)).transpose(0, 1)
            all_depths: Any = LazyState.with_hidden(state, lambda _: self.hidden)
            (losses,) = all_depths.results(shares.flatten(0, 2), ["loss"])
            losses = losses.view(shares.shape).transpose(0, 1).flatten(1, 2)
            main, *others = zip(self.labels, losses, strict=True)
            self.remaining = [*others, main]
        own_labels, loss = self.remaining.pop(0)
        loss = loss.where(labels == own_labels, torch.nan)  # Megatron has to roll labels as here
        # The sum of no numbers connects the model's loss with the nodes of its hidden states.
        return loss if self.remaining else loss + state.hidden[:0].sum()


def _shard_state(logits: Any) -> _ShardState | None:
    """Return the state of lazy logits from which losses or log-probabilities can be computed, or None."""
    state = state_of(logits)
    if not isinstance(state, _ShardState) or state.class_dim != -1:
        return None
    form = state.normal_form  # a softmax would be over this process's classes
    return state if form == NormalForm(*form[:2], has_divisor=form.has_divisor) else None


_usage = Usage()


def _make_output_layer_lazy(
    contexts: contextlib.ExitStack, layer: Any, options: ChunkOptions | None, gathers_tokens: bool, depths: Any = None
) -> None:
    """Let a `ColumnParallelLinear` return lazy logits until `contexts` end.

    ``gathers_tokens``: gather the tokens of sequence parallelism at the call of the layer, so that other code can
    select tokens from the lazy logits. Otherwise the loss gathers the tokens, and reduce-scatters their gradient.
    """
    if layer.config.defer_embedding_wgrad_compute:
        raise ValueError("flce needs defer_embedding_wgrad_compute=False in the TransformerConfig, got True")
    if "_forward_impl" in vars(layer):  # `output_processor` of a model with `install`, whose options apply
        return
    stock_product = layer._forward_impl

    def product(**kwargs: Any) -> Any:
        hidden, weight, bias, group = (kwargs[name] for name in ("input", "weight", "bias", "tp_group"))
        # `gtp_remat_size`: the number of processes that have parts of this process's classes.
        if reason_not_lazy(hidden, weight, bias) is not None or kwargs.get("gtp_remat_size", 1) > 1:
            return stock_product(**kwargs)
        has_token_shares = kwargs["sequence_parallel"]
        if has_token_shares and gathers_tokens:
            # flce sums the gradient over the processes, so that each process keeps its share.
            hidden, has_token_shares = gather_tokens(hidden, tensor_parallel_output_grad=False, group=group), False
        optimizer_steps.register()
        division = _ShardDivision(None, len(weight), None, group, has_token_shares, depths)
        head_call = HeadCall(weight, bias, _usage, layer, None)
        state = head_state(hidden, weight, bias, Settings(options), head_call, division)
        logits = make_lazy(_ShardState(**vars(state)))
        return logits if kwargs.get("output_dtype") is None else logits.to(kwargs["output_dtype"])

    contexts.callback(delattr, layer, "_forward_impl")
    layer._forward_impl = product


_STOCK = {name: getattr(GPTModel, name) for name in ("_postprocess", "compute_language_model_loss")}


def install(
    *, lazy: bool = False, gradient_accumulation_fusion: bool = False, options: ChunkOptions | None = None
) -> None:
    """Compute the loss of every Megatron-Core `GPTModel` with flce, without logits in memory.

    With labels a model returns the loss of each token (B, S), as before, in training and in evaluation. Models that
    exist already and subclasses are included. A second call replaces the arguments of the first call.

    Args:
        lazy: without labels a model returns lazy logits (B, S, V / processes), from which `vocab_parallel_logprobs` and
            `vocab_parallel_entropy` compute results without the logits. A temperature, casts and selections of tokens
            are lazy too. Other operations compute the real logits, with a warning.
        gradient_accumulation_fusion: backward adds the gradient of the head to the `main_grad` of its weight, without a
            second matrix of V x H. The same option of Megatron-Core's `TransformerConfig`, and Apex, are not needed.
        options: memory and precision, see `flce.ChunkOptions`.

    Raises:
        TypeError: `options` are not `flce.ChunkOptions`.
    """
    check_options(options)
    if gradient_accumulation_fusion:
        options = replace(options or DEFAULT_OPTIONS, gradient_accumulation_fusion=True)
    GPTModel.flce_lazy, GPTModel.flce_options = lazy, options
    GPTModel._postprocess = _postprocess
    GPTModel.compute_language_model_loss = _compute_language_model_loss


def uninstall() -> None:
    """Undo `install`. Without `install`, this call has no effect."""
    for name, method in _STOCK.items():
        setattr(GPTModel, name, method)


@functools.wraps(_STOCK["_postprocess"])
def _postprocess(self: Any, **kwargs: Any) -> Any:
    stock = _STOCK["_postprocess"]
    layer = getattr(self, "output_layer", None)  # of the last pipeline stage
    if not isinstance(layer, ColumnParallelLinear) or kwargs.get("inference_context") is not None:
        return stock(self, **kwargs)
    has_labels, num_mtp_layers, depths = kwargs.get("labels") is not None, self.config.mtp_num_layers, None
    gathers_classes = kwargs.get("runtime_gather_output")
    gathers_classes = layer.gather_output if gathers_classes is None else gathers_classes
    with contextlib.ExitStack() as contexts:
        if num_mtp_layers and not has_labels and not hasattr(gpt_model, "process_mtp_loss"):
            # Megatron-Core before 0.17 needs labels for the losses of MTP layers.
            if not kwargs.get("mtp_in_postprocess"):  # an earlier stage has run the MTP layers
                kwargs["hidden_states"] = kwargs["hidden_states"].chunk(1 + num_mtp_layers)[0]
            kwargs["mtp_in_postprocess"] = False
            for owner, name in ((self.config, "mtp_num_layers"), (self, "mtp_process")):
                contexts.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, None)
        if (gathers_classes and layer.tp_group.size() > 1) or not (has_labels or self.flce_lazy):
            return stock(self, **kwargs)
        kwargs["runtime_gather_output"] = False
        if kwargs.get("mtp_in_postprocess") and self.share_embeddings_and_output_weights:
            # `grad_added_to_main_grad` discards the gradient of the MTP layers' embedding, unless this is set.
            # Megatron sets it without pipeline stages only.
            self.shared_embedding_or_output_weight().zero_out_wgrad = True
        # With `mtp_detach_heads` the losses of MTP layers have no gradient of the head.
        is_separate = getattr(self.config, "mtp_detach_heads", False) or kwargs.get("output_processor")
        if has_labels and num_mtp_layers and not is_separate:
            depths = _Depths(self, **kwargs)
            if kwargs.get("mtp_in_postprocess"):
                contexts.enter_context(self.mtp.register_forward_hook(depths.set_hidden))
        _make_output_layer_lazy(contexts, layer, self.flce_options, not has_labels, depths)
        return stock(self, **kwargs)


@functools.wraps(_STOCK["compute_language_model_loss"])
def _compute_language_model_loss(self: Any, labels: Tensor, logits: Any) -> Any:
    state = _shard_state(logits)
    if state is None:
        real = logits.materialize() if is_lazy(logits) else logits
        return _STOCK["compute_language_model_loss"](self, labels, real)
    depths = state.division.depths
    loss = depths.next_loss(state, labels.t()) if depths else state.results(labels.t(), ["loss"])[0]
    return loss.t().contiguous()


class FlceGPTModel(GPTModel):
    """Megatron-Core's `GPTModel` whose loss flce computes, without `install` for other models.

    The arguments are the arguments of `GPTModel`.

    Attributes:
        flce_lazy, flce_options: `lazy` and `options` of `install`. A subclass may have other values.
    """

    flce_lazy = False
    flce_options: ChunkOptions | None = None
    _postprocess = _postprocess
    compute_language_model_loss = _compute_language_model_loss


def output_processor(
    *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, labels: Tensor,
    context: Mapping[str, Any] | None = None, scale_logits: Callable[[Any], Any] = lambda logits: logits, **others: Any,
) -> Any:  # fmt: skip
    """Compute losses or log-probabilities of labels without logits, as the output processor of a `GPTModel`.

    Pass it to a ``GPTModel.forward`` that has the parameters, since Megatron-Core 0.18:
    ``model(ids, positions, mask, labels=labels, output_processor=output_processor, output_processor_context=context)``.

    Args:
        hidden_states, output_layer, output_weight, scale_logits, others: Megatron-Core passes them.
        labels: (B, S) class indices. Negative labels are ignored: their results are 0.
        context: None: the loss of each label. Otherwise names of results of `flce.linear_logprobs`, and a temperature:
            ``{"outputs": ("logprob", "entropy"), "temperature": 0.7}``.

    Returns:
        The losses (B, S), or with `context` a `flce.LinearLogprobsOutput` with results (B, S).
    """
    with contextlib.ExitStack() as contexts:
        _make_output_layer_lazy(contexts, output_layer, None, gathers_tokens=False)
        logits, _ = output_layer(hidden_states, weight=output_weight, runtime_gather_output=False)
    state = _shard_state(scale_logits(logits))
    if state is None:
        raise TypeError(f"output_processor needs a linear output layer, whose logits can be lazy, got {output_layer}")
    if context is None:
        return state.results(labels.t(), ["loss"])[0].t().contiguous()
    results = state.results(labels.t(), **context)
    return LinearLogprobsOutput(**{k: x.t().contiguous() for k, x in zip(context["outputs"], results, strict=True)})


def vocab_parallel_logprobs(
    vocab_parallel_logits: Tensor, labels: Tensor, group: Any = None, *, with_entropy: bool = False
) -> Any:
    """Return the log-probability of each label, with gradients.

    Args:
        vocab_parallel_logits: (..., V / processes) logits of this process's classes. After ``install(lazy=True)``
            models return lazy logits, from which the result is computed without the logits.
        labels: (...) class indices of the full vocabulary. Negative labels are ignored: their results are 0.
        group: the tensor-parallel processes; None: Megatron's group.
        with_entropy: return entropies too. From lazy logits both are computed in one call.

    Returns:
        The log-probabilities (...), or with `with_entropy` a tuple of log-probabilities and entropies, in float32
        (float64 for float64 logits).
    """
    group, state = group or parallel_state.get_tensor_model_parallel_group(), _shard_state(vocab_parallel_logits)
    if state is not None:
        results = state.results(labels, ["logprob", "entropy"] if with_entropy else ["logprob"], group)
        return tuple(results) if with_entropy else results[0]
    division = {"process_group": group, "vocab_size": vocab_parallel_logits.shape[-1] * group.size()}
    loss = cross_entropy(vocab_parallel_logits, labels.where(labels >= 0, -100), reduction="none", **division)
    return (-loss, vocab_parallel_entropy(vocab_parallel_logits, group) * (labels >= 0)) if with_entropy else -loss


def vocab_parallel_entropy(vocab_parallel_logits: Tensor, group: Any = None) -> Tensor:
    """Return the entropy (...) of each token, with gradients. Arguments are as in `vocab_parallel_logprobs`."""
    group, state = group or parallel_state.get_tensor_model_parallel_group(), _shard_state(vocab_parallel_logits)
    if state is not None:
        return state.results(None, ["entropy"], group)[0]
    sum_over_group = functools.partial(mappings.reduce_from_tensor_model_parallel_region, group=group)
    logits = vocab_parallel_logits if vocab_parallel_logits.dtype == torch.float64 else vocab_parallel_logits.float()
    largest = logits.detach().amax(-1, keepdim=True)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    shifted = (logits - largest).clamp(min=-1e4)  # exp(-1e4) is 0; 0 times -inf would be NaN
    exponentials = shifted.exp()
    total = sum_over_group(exponentials.sum(-1))
    entropy: Tensor = total.log() - sum_over_group((exponentials * shifted).sum(-1)) / total
    return entropy
