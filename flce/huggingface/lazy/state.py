"""What lazy logits would be computed from: the sum of some :mod:`.terms`, and what has been done to it since.

:class:`LazyState` is immutable; every operation makes another. It knows how to compute the logits as the model
would have, bit for bit, and how to do without them: the fused loss, and the values that models and trainers
take from logits. Nothing here knows how tensors come to be intercepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from flce.core.options import ChunkOptions
from flce.core.problem import LinearLogprobsOutput, accumulation_dtype
from flce.functional import fused_linear_cross_entropy, linear_logprobs
from flce.huggingface.head_call import HeadCall, gather_weights
from flce.huggingface.lazy.normal_form import (
    IDENTITY,
    NORMAL_FORM_UPDATES,
    NoLazyFormError,
    NormalForm,
    Op,
    replay,
    require_lazy,
)
from flce.huggingface.lazy.terms import TENSOR_NAMES, Term, in_float32
from flce.huggingface.staleness import versions_of
from flce.ops.arguments import autocast_dtype, autocast_operand_dtype, autocast_result_dtype

OnMaterialize = Literal["warn", "ignore", "raise"]


@dataclass(frozen=True)
class Settings:
    """What the user of ``patch_model`` has chosen."""

    options: ChunkOptions | None = None
    on_materialize: OnMaterialize = "warn"


@dataclass(frozen=True)
class LazyState:
    """The sum of some terms of one shape, and what was done to it. The last dimension are the classes.

    Attributes:
        terms: the head's product first, then those of its adapters, and biases.
        dtype: of the logits.
        ops: elementwise operations since, in order, so that materialised logits are bit for bit the model's.
        normal_form: their normal form.
        autocast_dtype: what the head ran under, None for no autocast.
        device: where the logits are wanted.
        calls: the calls of the head and its adapters that made the terms; none under the compiler.
        token_vectors: ``(..., 1)``, vectors of one number a token, which operations refer to by their place here.
        is_single_class: there is one class, and no dimension of classes.
    """

    terms: tuple[Term, ...]
    dtype: torch.dtype
    autocast_dtype: torch.dtype | None
    device: torch.device
    settings: Settings
    ops: tuple[Op, ...] = ()
    normal_form: NormalForm = IDENTITY
    calls: tuple[HeadCall, ...] = field(default=(), compare=False, repr=False)
    token_vectors: tuple[Tensor, ...] = field(default=(), compare=False, repr=False)
    is_single_class: bool = False
    cached_results: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """What was computed from the same terms; states that elementwise operations make share this dict."""

    # -- what it looks like

    @property
    def hidden(self) -> Tensor:
        """The hidden states of the head."""
        hidden = self.terms[0].hidden
        assert hidden is not None
        return hidden

    @property
    def weight(self) -> Tensor:
        """The weight of the head."""
        weight = self.terms[0].weight
        assert weight is not None
        return weight

    @property
    def shape(self) -> torch.Size:
        head = self.terms[0]
        assert head.hidden is not None
        assert head.weight is not None
        tokens = head.hidden.shape[:-1]
        return tokens if self.is_single_class else torch.Size((*tokens, head.weight.shape[0]))

    @property
    def ndim(self) -> int:
        return self.hidden.dim() - self.is_single_class

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0]

    @property
    def product_device(self) -> torch.device:
        """Where the products are made."""
        return self.hidden.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        found = [tensor for term in self.terms for tensor in (term.hidden, term.weight, term.bias)]
        return (*[tensor for tensor in found if tensor is not None], *self.token_vectors)

    @property
    def resolved_terms(self) -> tuple[Term, ...]:
        """The terms with their values, within :meth:`gathered_weights`."""
        return tuple([term.resolve_stand_ins() for term in self.terms])

    @property
    def requires_grad(self) -> bool:
        return any([tensor.requires_grad for tensor in self.tensors])  # noqa: C419 - faster than a generator

    @property
    def is_outside_checkpoint(self) -> bool:
        """Whether this code runs within a checkpoint that a call was not made in."""
        return not torch.compiler.is_compiling() and any(call.is_outside_checkpoint for call in self.calls)

    # -- others like it

    def with_op(self, name: str, value: Any = None) -> LazyState:
        """The state after one more elementwise operation, if that has a lazy form."""
        step = NORMAL_FORM_UPDATES[name].fold
        normal_form = self.normal_form if step is None else step(self.normal_form, value)
        if normal_form is None:
            raise NoLazyFormError
        dtype = value if name == "to" else self.dtype
        return replace(self, ops=(*self.ops, (name, value)), normal_form=normal_form, dtype=dtype)

    def as_copy(self) -> LazyState:
        """The state of a copy. Autograd keeps what some operations return: a copy of that may be changed in place."""
        saves_result = self.ops and self.ops[-1][0] in ("tanh", "log_softmax", "softmax", "exp")
        return replace(self, ops=(*self.ops, ("clone", None))) if saves_result else self

    def with_hidden(self, function: Callable[[Tensor], Tensor]) -> LazyState:
        """The state after an operation on the token dimensions, which is done to the hidden states instead."""
        terms = tuple([term.with_hidden(function) for term in self.terms])
        return replace(self, terms=terms, token_vectors=tuple(map(function, self.token_vectors)), cached_results={})

    def with_terms(self, terms: Iterable[Term], **others: Any) -> LazyState:
        """The state of another sum."""
        return replace(self, terms=tuple(terms), cached_results={}, **others)

    def with_tensors(self, tensors: Iterator[Tensor]) -> LazyState:
        """The state on the next of other tensors, in the order of :attr:`tensors`."""
        terms = [term.with_tensors(tensors) for term in self.terms]
        return self.with_terms(terms, token_vectors=tuple(islice(tensors, len(self.token_vectors))))

    def detach(self) -> LazyState:
        terms = tuple(term.detach() for term in self.terms)
        token_vectors = tuple([row.detach() if row.requires_grad else row for row in self.token_vectors])
        return replace(self, terms=terms, token_vectors=token_vectors)

    def in_float32(self) -> LazyState:
        """The state of logits that are made in float32, outside of autocast."""
        with self.gathered_weights():
            return self.with_terms(
                [term.map_tensors(in_float32, *TENSOR_NAMES) for term in self.terms], autocast_dtype=None
            )

    def with_calls(self, calls: tuple[HeadCall, ...]) -> LazyState:
        """The state as it is now: later changes of ``requires_grad`` do not reach it, and others are noticed."""
        return self.with_terms([term.with_snapshot() for term in self.terms], calls=calls)

    # -- what it is for

    def gathered_weights(self, can_synchronize: bool = False) -> AbstractContextManager[None]:
        """Around whatever reads the weights: FSDP or ZeRO-3 may have freed them.

        Args:
            can_synchronize: wait for a GPU to compare values, even if nothing points to a change.

        Raises:
            RuntimeError: something that the logits are made from has changed since the model ran.
        """
        for term in self.terms:
            if term.snapshot is not None:
                term.snapshot.check_unchanged(can_synchronize)
        if not self.calls:  # in a graph
            return nullcontext()
        return gather_weights(self.calls, lambda call: call.check_unchanged(can_synchronize), self.tensors)

    def logits(self) -> Tensor:
        """Compute the logits as the model would have, with the same roundings."""
        with self.gathered_weights(can_synchronize=True):
            logits = self._sum_of_products(F.linear).to(self.device)
            return logits.squeeze(-1) if self.is_single_class else logits

    def of_classes(self, index: Tensor) -> Tensor:
        """The logits of some classes, which are last: ``index`` is ``(..., K)``, of each token, or ``(K,)``, of all."""
        index = index.to(self.product_device)

        def product(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            if index.dim() == 1:
                return F.linear(hidden, weight[index], None if bias is None else bias[index])
            z = torch.matmul(F.embedding(index, weight), hidden.unsqueeze(-1)).squeeze(-1)
            return z if bias is None else z + bias[index].to(z.dtype)

        self.note_values()
        with self.gathered_weights():
            return self._sum_of_products(product, lambda bias: bias[index]).to(self.device)

    def note_values(self) -> None:
        """Note that values are computed without the logits. They may differ from real logits in the last bits."""
        for call in self.calls:
            call.has_returned_values = True

    def _sum_of_products(
        self,
        product: Callable[[Tensor, Tensor, Tensor | None], Tensor],
        vector: Callable[[Tensor], Tensor] = lambda bias: bias,
    ) -> Tensor:
        total = None
        for term in self.resolved_terms:
            if term.hidden is None and term.bias is not None:
                z = vector(term.bias)
            else:
                z = self._in_head_autocast(product, term.hidden, term.weight, term.bias)
            z = replay(z, term.ops)
            total = z if total is None else total + z
        assert total is not None
        return self.apply_ops(total, self.ops)

    def apply_ops(self, z: Tensor, ops: tuple[Op, ...]) -> Tensor:
        """Logits or results of all tokens, with the classes last, after some operations."""
        return replay(z, ops, [row.to(z.device) for row in self.token_vectors])

    def normalizer(self) -> Tensor | float:
        """What was subtracted from each token's logits, of the tokens' shape."""
        place = self.normal_form.normalizer
        return 0.0 if place is None else self.token_vectors[place].squeeze(-1)

    def is_own_logsumexp(self, vector: Tensor) -> bool:
        """Whether a vector is what ``logsumexp`` has returned for these logits."""
        return any(
            [  # noqa: C419
                vector is own and version == versions_of(own)
                for own, version in self.cached_results.get("logsumexp", ())
            ]
        )

    def cross_entropy(self, target: Tensor, weight: Tensor | None = None, **spec: Any) -> Tensor:
        """The loss without the logits. ``target``: class indices, of the tokens' shape."""
        with self.gathered_weights():
            loss = self.fused_loss(target, weight=weight, **spec)
        # Autocast would have run stock's cross-entropy in float32; without it the loss has the logits' dtype.
        return loss.to(self.device, autocast_result_dtype(self.dtype, self.device.type))

    def argmax(self) -> Tensor:
        """The most probable class of each token."""
        target = torch.zeros(self.shape[:-1], dtype=torch.int64, device=self.product_device)
        with self.gathered_weights(can_synchronize=True):
            output = self.detach().fused_loss(target, reduction="none", ignore_index=-100, stats=("argmax",))
        largest: Tensor = output.argmax.to(self.device)
        return largest

    def fused_loss(self, target: Tensor, weight: Tensor | None = None, **spec: Any) -> Any:
        """What :func:`flce.fused_linear_cross_entropy` returns for these logits, within :meth:`gathered_weights`.

        Not of tokens with a divisor each.
        """
        require_lazy(self.normal_form.divisor is None)
        if spec.get("reduction") == "none":
            self.note_values()
        weight = None if weight is None else weight.to(self.product_device)
        return self._call_operator(fused_linear_cross_entropy, target, self.settings.options, weight=weight, **spec)

    def token_results(
        self, *outputs: str, target: Tensor | None = None, candidates: Tensor | None = None, **spec: Any
    ) -> LinearLogprobsOutput:
        """What :func:`flce.linear_logprobs` returns for these logits, with gradients.

        The same bits with and without gradients, so that the ratio of two policies is 1 as long as they are one.
        """
        options = self.settings.options
        if isinstance(options, ChunkOptions) and options.logits_dtype in (
            torch.float16,
            torch.bfloat16,
        ):  # for the loss
            options = replace(options, logits_dtype=None)
        place = self.normal_form.divisor
        if place is not None:
            spec["temperature"] = self.token_vectors[place].squeeze(-1) * spec.get("temperature", 1.0)
        candidates = None if candidates is None else candidates.to(self.product_device)
        self.note_values()
        with self.gathered_weights():
            made: LinearLogprobsOutput = self._call_operator(
                linear_logprobs, target, options, outputs=outputs, candidates=candidates, **spec
            )
        return made

    def lse_and_entropy(self) -> tuple[Tensor, Tensor]:
        """The normalizer and the entropy of each token's z, by one call for both.

        A formula that takes one from the other asks twice. The gradients of two calls would be rounded apart, and their
        difference is small where probabilities are nearly equal.
        """
        # Known results are no part of a graph. Both passes of a checkpoint save the same tensors.
        if torch.compiler.is_compiling() or self.is_outside_checkpoint:
            made = self.token_results("lse", "entropy")
        else:
            normal_form = self.normal_form
            divisor = None if normal_form.divisor is None else self.token_vectors[normal_form.divisor]
            modes = self.requires_grad, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            key = id(divisor), normal_form.logit_scale, normal_form.softcap, *modes
            with self.gathered_weights():  # known results are of weights that have not changed
                if key not in self.cached_results:
                    self.cached_results[key] = (
                        divisor,
                        self.token_results("lse", "entropy"),
                    )  # kept, the divisor keeps its id
            made = self.cached_results[key][1]
        assert made.lse is not None
        assert made.entropy is not None
        return made.lse, made.entropy

    def _call_operator(
        self, function: Callable[..., Any], target: Tensor | None, options: ChunkOptions | None, **spec: Any
    ) -> Any:
        """One of flce's functions of a head and its input."""
        products, biases = [], []
        dtype = self.weight.dtype
        requires_grad = torch.is_grad_enabled() and self.requires_grad
        for term in self.resolved_terms:
            factor = term.factor
            if term.bias is not None:
                bias = term.bias.to(accumulation_dtype(dtype))
                biases.append(bias if factor == 1.0 else bias * factor)
            if term.hidden is not None and term.weight is not None:
                hidden, weights = term.hidden, term.weight
                hidden = hidden if factor == 1.0 else hidden * factor
                if self.autocast_dtype is None:  # an adapter in float32 on a head in bfloat16 is cast, not the head
                    hidden, weights = hidden.to(dtype), weights.to(dtype)
                products.append((hidden, weights))
        if len(products) > 1:  # not an argument otherwise: one product is what most models have
            spec["adapters"] = tuple(products[1:])
        for call in self.calls:
            call.usage.fused += call is self.calls[0]
            call.has_bypassing_gradient |= requires_grad
            call.usage.has_gradient_use |= call.has_bypassing_gradient
        normal_form = self.normal_form
        hidden, weights = products[0]
        # What was subtracted before a normalisation gets a gradient of zeros.
        cancelled = [
            row for place, row in enumerate(self.token_vectors) if row.requires_grad and place != normal_form.normalizer
        ]
        for row in cancelled if requires_grad else ():
            hidden = torch.where(torch.ones((), dtype=torch.bool, device=row.device), hidden, row.to(hidden.dtype))
        return self._in_head_autocast(
            function,
            hidden,
            weights,
            None if target is None else target.to(self.product_device),
            linear_bias=sum(biases[1:], biases[0]) if biases else None,
            logit_scale=normal_form.logit_scale,
            softcap=normal_form.softcap,
            options=options,
            **spec,
        )

    def _in_head_autocast(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call with the autocast state the head was called with, which may have been left since."""
        kind = self.product_device.type
        now = autocast_dtype(kind)
        if now == self.autocast_dtype:
            return function(*args, **kwargs)
        enabled = self.autocast_dtype is not None
        with torch.autocast(kind, dtype=self.autocast_dtype if enabled else now, enabled=enabled):
            return function(*args, **kwargs)


def head_state(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    settings: Settings | None = None,
    call: HeadCall | None = None,
) -> LazyState:
    """The state of ``F.linear(hidden, weight, bias)``, called now.

    Args:
        hidden: ``(..., H)``, floating.
        weight: ``(V, H)``.
        bias: ``(V,)`` or None.
        settings: what ``patch_model`` was called with.
        call: what wrappers and weights are watched by; None under the compiler.
    """
    device = hidden.device
    autocast = autocast_dtype(device.type)
    dtype = hidden.dtype if autocast is None else autocast_operand_dtype(hidden.dtype, device.type)
    term = Term(hidden, weight, bias)
    settings = Settings() if settings is None else settings
    state = LazyState((term,), dtype, autocast, device, settings)
    return state if call is None else state.with_calls((call,))


def normalized_dim(state: LazyState, dim: int) -> int:
    if not -state.ndim <= dim < state.ndim:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-state.ndim}, {state.ndim - 1}], but got {dim})"
        )
    return dim % state.ndim
