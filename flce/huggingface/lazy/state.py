"""`LazyState`: the record from which lazy logits are computed, a sum of terms and operations on this sum.

A state is immutable; each operation returns a new one. It computes the real logits, bit for bit as the model would, the
fused loss, and other results without logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from flce.core.options import ChunkOptions
from flce.core.problem import LossSpec, accumulation_dtype
from flce.functional import fused_linear_cross_entropy, linear_logprobs
from flce.huggingface.divided_head import HeadDivision
from flce.huggingface.head_call import HeadCall, TensorSnapshot, gather_weights, version_of
from flce.huggingface.lazy.normal_form import (
    IDENTITY,
    NORMAL_FORM_UPDATES,
    NoLazyFormError,
    NormalForm,
    Op,
    replay,
    require_lazy,
    to_normal_form,
)
from flce.huggingface.wrappers import is_partitioned, make_stand_in, resolve_stand_in, stand_in_parameters
from flce.ops.arguments import autocast_dtype, autocast_operand_dtype, autocast_result_dtype, check_options

OnMaterialize = Literal["warn", "ignore", "raise"]
TENSOR_NAMES = ("hidden", "weight", "bias")


@dataclass(frozen=True)
class Settings:
    """The arguments of ``patch_model``, checked in the constructor."""

    options: ChunkOptions | None = None
    on_materialize: OnMaterialize = "warn"
    empty_loss: str = "nan"

    def __post_init__(self) -> None:
        check_options(self.options)
        LossSpec(empty_loss=self.empty_loss)  # checks it
        if self.on_materialize not in ("warn", "ignore", "raise"):
            raise ValueError(f"on_materialize must be 'warn', 'ignore' or 'raise', got {self.on_materialize!r}")


@dataclass(frozen=True)
class Term:
    """One summand of logits: a matrix product, or a vector that was added to the logits of every token.

    Attributes:
        hidden: hidden states ``(..., H)`` with the token dimensions of the logits ``(..., V)``. Operations on the token
            dimensions of the logits are applied to this tensor. None for a vector.
        weight: ``(V, H)``; None for a vector.
        bias: ``(V,)``: the bias of the product, or the vector, whose dtype may be wider than the logits'; or None.
        ops: factors and casts that were applied before the term was added to others.
        snapshot: the snapshot of the first of `tensors` at the call; None if `tensors` has a copy, which other code
            cannot change. The `HeadCall` has the snapshots of the head's parameters.
    """

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    ops: tuple[Op, ...] = ()
    snapshot: TensorSnapshot | None = field(default=None, compare=False, repr=False)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple([x for x in (self.hidden, self.weight, self.bias) if x is not None])

    @property
    def factor(self) -> float:
        return to_normal_form(self.ops).logit_scale

    def map_tensors(self, function: Callable[[Tensor], Tensor], *names: str, **others: Any) -> Term:
        """Return the term with ``function`` applied to the named tensors that exist, and with other fields replaced."""
        for name in names:
            tensor = getattr(self, name)
            if tensor is not None:
                others[name] = function(tensor)
        return replace(self, **others)

    def with_hidden(self, function: Callable[[Tensor], Tensor]) -> Term:
        """Return the term after an operation on the token dimensions."""
        if self.hidden is None:
            return self
        hidden, snapshot = function(self.hidden), self.snapshot
        if snapshot is not None and hidden.untyped_storage()._cdata != self.hidden.untyped_storage()._cdata:
            snapshot = snapshot.for_copy()
        return replace(self, hidden=hidden, snapshot=snapshot)

    def with_snapshot(self) -> Term:
        """Return the term with a snapshot, and with aliases that have the present ``requires_grad`` of its tensors."""
        tensors = {name: getattr(self, name) for name in TENSOR_NAMES}
        aliases: dict[str, Any] = {
            name: alias_in_graph(tensor) for name, tensor in tensors.items() if tensor is not None
        }
        name = "a vector that was added to the logits was" if self.hidden is None else "the hidden states were"
        return replace(self, **aliases, snapshot=TensorSnapshot(next(iter(aliases.values())), name))


def alias_in_graph(tensor: Tensor) -> Tensor:
    """Return an alias of a leaf with the leaf's present ``requires_grad``, or the tensor if it is not a leaf.

    The ``requires_grad`` of a leaf may change later: PEFT's ``disable_adapter()`` changes it for a while. Stock logits
    record at the call whether the leaf needs a gradient. The alias shares the version and the storage of the leaf, even
    if a wrapper frees the storage and fills it again. The alias of a ZeRO-3 parameter is a stand-in.
    """
    if not tensor.is_leaf:
        return tensor
    alias = tensor.view_as(tensor) if tensor.requires_grad and torch.is_grad_enabled() else tensor.detach()
    return make_stand_in(alias, tensor) if is_partitioned(tensor) else alias


@dataclass(frozen=True)
class LazyState:
    """A sum of terms with equal token dimensions, and the operations on it. The last dimension contains the classes.

    Attributes:
        terms: the product of the head first, then products of adapters, and biases.
        dtype: the dtype of the logits.
        autocast_dtype: the dtype of autocast in the call of the head, or None.
        device: the device of the logits. The products may be on another one, see `product_device`.
        settings: the arguments of ``patch_model``.
        ops: elementwise operations on the sum in order, so that real logits are bit for bit the model's.
        normal_form: the normal form of `ops`.
        calls: the calls of the head and its adapters; empty under the compiler.
        token_vectors: the vector ``(..., 1)``, with one number for each token, of the operation with this name.
        class_dim: the dimension of the classes: -1; 1: they are before the tokens of a sequence, as `cross_entropy`
            expects classes; None: one class is selected, so that the logits have no dimension of classes.
        division: the division of the head over processes. Weights and biases of `terms` then have the classes of this
            process. None: they have all classes.
        teacher: log-probabilities of another model, for differences from them and products with their exponentials.
    """

    terms: tuple[Term, ...]
    dtype: torch.dtype
    autocast_dtype: torch.dtype | None
    device: torch.device
    settings: Settings
    ops: tuple[Op, ...] = ()
    normal_form: NormalForm = IDENTITY
    calls: tuple[HeadCall, ...] = field(default=(), compare=False, repr=False)
    token_vectors: dict[str, Tensor] = field(default_factory=dict, compare=False, repr=False)
    class_dim: int | None = -1
    division: HeadDivision | None = None
    teacher: LazyState | None = field(default=None, compare=False, repr=False)
    cached_results: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """Results from the same terms. States before and after elementwise operations share this dict."""

    # -- metadata and tensors

    @property
    def hidden(self) -> Tensor:
        """The hidden states of the head."""
        return self.terms[0].hidden  # type: ignore[return-value]

    @property
    def weight(self) -> Tensor:
        """The weight of the head."""
        return self.terms[0].weight  # type: ignore[return-value]

    @property
    def shape(self) -> torch.Size:
        head: Any = self.terms[0]
        tokens = head.hidden.shape[:-1]
        vocab_size = head.weight.shape[0] if self.division is None else self.division.vocab_size
        if self.class_dim == -1:
            return torch.Size((*tokens, vocab_size))
        return tokens if self.class_dim is None else torch.Size((tokens[0], vocab_size, *tokens[1:]))

    @property
    def ndim(self) -> int:
        return self.terms[0].hidden.dim() - (self.class_dim is None)  # type: ignore[union-attr]

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0] if self.division is None else self.division.vocab_size

    @property
    def is_dtensor(self) -> bool:
        """True if the logits are a DTensor in stock."""
        return self.division is not None and self.division.placement is not None

    @property
    def product_device(self) -> torch.device:
        """The device of the products."""
        return self.terms[0].hidden.device  # type: ignore[union-attr]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        # `torch.compile` cannot trace `functools.cached_property` of Python 3.11, which has a lock.
        tensors = [x for term in self.terms for x in (term.hidden, term.weight, term.bias) if x is not None]
        return (*tensors, *self.token_vectors.values())

    @property
    def resolved_terms(self) -> tuple[Term, ...]:
        """The terms with gathered ZeRO-3 parameters instead of stand-ins. Read it within :meth:`gathered_weights`."""
        if not stand_in_parameters(self.tensors):
            return self.terms
        return tuple([term.map_tensors(resolve_stand_in, "weight", "bias") for term in self.terms])

    @property
    def requires_grad(self) -> bool:
        return any([tensor.requires_grad for tensor in self.tensors])  # noqa: C419 - faster than a generator

    @property
    def differentiated_terms(self) -> tuple[bool, ...]:
        """True for each tensor of the terms that requires a gradient. Detached states have the same cache."""
        return tuple([tensor.requires_grad for term in self.terms for tensor in term.tensors])

    @property
    def cancelled_vector(self) -> Tensor | None:
        """The vector that was subtracted from the logits and cancels in the softmax, if it requires a gradient."""
        vector = self.token_vectors.get("sub_row")
        return None if vector is None or self.normal_form.has_normalizer or not vector.requires_grad else vector

    @property
    def is_outside_checkpoint(self) -> bool:
        """True if the running code is within a checkpoint, and a call of the head was outside of it."""
        return not torch.compiler.is_compiling() and any(call.is_outside_checkpoint for call in self.calls)

    # -- changed states

    def with_op(self, name: str, value: Any = None) -> LazyState:
        """Return the state after one more elementwise operation. Raise NoLazyFormError if it has no normal form."""
        normal_form = NORMAL_FORM_UPDATES[name].fold(self.normal_form, value)
        dtype = value if name == "to" else self.dtype
        return replace(self, ops=(*self.ops, (name, value)), normal_form=normal_form, dtype=dtype)

    def as_copy(self) -> LazyState:
        """Return the state of a copy. Autograd saves the result of some operations, so these are cloned for a copy."""
        saves_result = self.ops and self.ops[-1][0] in ("tanh", "log_softmax", "softmax", "exp")
        return replace(self, ops=(*self.ops, ("clone", None))) if saves_result else self

    def with_hidden(self, function: Callable[[Tensor], Tensor]) -> LazyState:
        """Return the state after an operation on the token dimensions, which is applied to the hidden states."""
        terms = tuple([term.with_hidden(function) for term in self.terms])
        vectors = {name: function(vector) for name, vector in self.token_vectors.items()}
        return replace(self, terms=terms, token_vectors=vectors, cached_results={})

    def with_terms(self, terms: Iterable[Term], **others: Any) -> LazyState:
        """Return the state with other terms."""
        return replace(self, terms=tuple(terms), cached_results={}, **others)

    def map_token_vectors(self, function: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        return {name: function(vector) for name, vector in self.token_vectors.items()}

    def with_tensors(self, tensors: Iterator[Tensor]) -> LazyState:
        """Return the state with the next of other tensors, which nothing changes in place, in the order of
        :attr:`tensors`."""
        terms = [term.map_tensors(lambda _: next(tensors), *TENSOR_NAMES, snapshot=None) for term in self.terms]
        return self.with_terms(terms, token_vectors=self.map_token_vectors(lambda _: next(tensors)))

    def detach(self) -> LazyState:
        token_vectors = self.map_token_vectors(lambda row: row.detach() if row.requires_grad else row)
        terms = tuple([term.map_tensors(Tensor.detach, *TENSOR_NAMES) for term in self.terms])
        return replace(self, terms=terms, token_vectors=token_vectors)

    def in_float32(self) -> LazyState:
        """Return the state with terms in float32, without autocast."""
        cast: Callable[[Tensor], Tensor] = lambda x: x if x.dtype == torch.float32 else resolve_stand_in(x).float()  # noqa: E731
        with self.gathered_weights():
            return self.with_terms([term.map_tensors(cast, *TENSOR_NAMES) for term in self.terms], autocast_dtype=None)

    def with_calls(self, calls: tuple[HeadCall, ...]) -> LazyState:
        """Return the state with snapshots. Later changes of ``requires_grad`` have no effect, others raise errors."""
        terms = tuple([term.with_snapshot() for term in self.terms])
        return replace(self, terms=terms, calls=calls, cached_results={})

    # -- results

    def gathered_weights(self, can_synchronize: bool = False) -> AbstractContextManager[None]:
        """Return a context for reads of the weights, which gathers weights that FSDP or ZeRO-3 has freed.

        Raise `StaleLogitsError` if a tensor has changed since the model ran. ``can_synchronize``: compare values on a
        GPU even if nothing indicates a change. The host waits for the GPU.
        """
        for term in self.terms:
            if term.snapshot is not None:
                term.snapshot.check_unchanged(can_synchronize)
        if not self.calls:  # in a graph
            return nullcontext()
        return gather_weights(self.calls, self.tensors, can_synchronize)

    def logits(self) -> Tensor:
        """Compute the logits as the model would have, with the same roundings."""
        with self.gathered_weights(can_synchronize=True):
            merge = None if self.division is None else self.division.merge_classes
            logits = self._sum_of_products(F.linear, merge=merge).to(self.device)
            if self.class_dim == -1:
                return logits  # a hook on a view would run at other times
            return logits.squeeze(-1) if self.class_dim is None else logits.transpose(1, 2)

    def of_classes(self, index: Tensor) -> Tensor:
        """Compute the logits ``(..., K)`` of classes. ``index``: ``(..., K)`` for each token, or ``(K,)`` for all."""
        index, merge = index.to(self.product_device), None
        if self.division is not None:
            division = self.division
            index, is_own = division.local_classes(index)

            def merge(values: Tensor) -> Tensor:
                return division.sum_over_processes(values.where(is_own, 0.0))

        def product(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            if self.division is not None and not len(weight):  # a process without classes
                weight, bias = F.pad(weight, (0, 0, 0, 1)), None if bias is None else F.pad(bias, (0, 1))
            if index.dim() == 1:
                return F.linear(hidden, weight[index], None if bias is None else bias[index])
            rows, hidden = F.embedding(index, weight), hidden.unsqueeze(-1)
            if bias is None:
                return torch.matmul(rows, hidden).squeeze(-1)
            operands = bias[index].to(rows.dtype).unsqueeze(-1), rows, hidden
            return torch.baddbmm(*(t.flatten(0, -3) for t in operands)).view(index.shape)  # rounded once, as in stock

        self.count_result(is_loss=False)
        with self.gathered_weights():
            return self._sum_of_products(product, lambda bias: bias[index], merge).to(self.device)

    def count_result(self, is_loss: bool) -> bool:
        """Count a result without the logits. Return True if its gradient will not pass through the logits."""
        requires_grad = torch.is_grad_enabled() and self.requires_grad
        is_fused = is_loss or requires_grad
        for call in self.calls:
            call.has_bypassing_gradient |= requires_grad
            call.usage.has_gradient_use |= call.has_bypassing_gradient
            call.usage.fused += is_fused and call is self.calls[0]
            call.usage.values += call is self.calls[0] and not is_fused
        return requires_grad

    def _sum_of_products(
        self, product: Callable[[Tensor, Tensor, Tensor | None], Tensor],
        vector: Callable[[Tensor], Tensor] = lambda bias: bias, merge: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the sum of all terms, with the operations on it. ``merge``: the function that computes the sum of a
        divided head from the sum of this process."""
        total = None
        for term in self.resolved_terms:
            if self.division is not None:
                term = term.map_tensors(self.division.sum_gradient, "hidden")
            if term.hidden is None and term.bias is not None:
                z = vector(term.bias)
            else:
                z = self._in_head_autocast(product, term.hidden, term.weight, term.bias)
            z = replay(z, term.ops)
            total = z if total is None else total + z
        assert total is not None
        return self.apply_ops(total if merge is None else merge(total), self.ops)

    def apply_ops(self, z: Tensor, ops: tuple[Op, ...]) -> Tensor:
        """Apply operations to logits or results of all tokens, with classes last."""
        place = (lambda row: row) if self.division is None or type(z) is Tensor else self.division.place_result
        others = self.map_token_vectors(lambda row: place(row.to(z.device)))
        if self.teacher is not None:
            others |= dict.fromkeys(("sub_teacher", "times_teacher"), self.teacher.logits())
        return replay(z, ops, others)

    def normalizer(self) -> Tensor | float:
        """Return the logsumexp that was subtracted from each token's logits, of the tokens' shape, or 0.0."""
        return self.token_vectors["sub_row"].squeeze(-1) if self.normal_form.has_normalizer else 0.0

    def is_own_logsumexp(self, vector: Tensor) -> bool:
        """Return True if a vector is an unchanged result of ``logsumexp`` for these logits."""
        results = self.cached_results.get("logsumexp", ())
        return any([vector is own and version == version_of(own) for own, version in results])  # noqa: C419 - faster

    def cross_entropy(self, target: Tensor, weight: Tensor | None = None, **spec: Any) -> Tensor:
        """Compute the loss without logits in memory. ``target``: class indices, of the tokens' shape."""
        with self.gathered_weights():
            loss = self.fused_loss(target, weight=weight, **spec)
        # Autocast runs stock's cross-entropy in float32. Without autocast the loss has the dtype of the logits.
        return loss.to(self.device, autocast_result_dtype(self.dtype, self.device.type))

    def argmax(self) -> Tensor:
        """Compute the most probable class of each token."""
        with self.gathered_weights(can_synchronize=True):
            return self.detach().token_results("argmax").argmax.to(self.device)

    def fused_loss(self, target: Tensor, weight: Tensor | None = None, **spec: Any) -> Any:
        """Call :func:`flce.fused_linear_cross_entropy` for these logits. Call it within :meth:`gathered_weights`."""
        if self.normal_form.has_divisor:
            raise NoLazyFormError
        weight = None if weight is None else weight.to(self.product_device)
        spec = {"empty_loss": self.settings.empty_loss, **spec}
        return self._call_operator(fused_linear_cross_entropy, target, self.settings.options, weight=weight, **spec)

    def token_results(
        self, *outputs: str, target: Tensor | None = None, candidates: Tensor | None = None, **spec: Any
    ) -> Any:
        """Call :func:`flce.linear_logprobs` for these logits, with gradients. Its fields are tensors, or None.

        Results have the same bits with and without gradients, so that the ratio of two equal policies is 1.
        """
        if self.normal_form.has_divisor:
            spec["temperature"] = self.token_vectors["div_row"].squeeze(-1) * spec.get("temperature", 1.0)
        spec |= {"candidates": None if candidates is None else candidates.to(self.product_device), "is_loss": False}
        with self.gathered_weights():
            return self._call_operator(linear_logprobs, target, self.token_options, outputs=outputs, **spec)

    @property
    def token_options(self) -> ChunkOptions | None:
        """The options for results of tokens, whose logits are not rounded."""
        options = self.settings.options
        if isinstance(options, ChunkOptions) and options.logits_dtype in (torch.float16, torch.bfloat16):
            options = replace(options, logits_dtype=None)
        return options

    def require_finite_bias(self) -> None:
        """Raise NoLazyFormError for an infinite bias on a CPU, because stock computes 0 * -inf. On a GPU the host would
        wait."""
        if torch.compiler.is_compiling() or self.product_device.type != "cpu":
            return
        require_lazy(self.division is None or all([term.bias is None for term in self.terms]))  # noqa: C419 - faster
        with self.gathered_weights():
            require_lazy(all([term.bias is None or bool(term.bias.isfinite().all()) for term in self.resolved_terms]))  # noqa: C419

    def lse_and_entropy(self) -> tuple[Tensor, Tensor]:
        """Compute the logsumexp and the entropy of each token's z in one call, and cache them.

        A formula that subtracts the two reads them separately. The gradients of two calls would be rounded separately,
        and their difference is small if probabilities are nearly equal.
        """
        # Cached results are not part of a graph, and both passes of a checkpoint have to save the same tensors.
        if torch.compiler.is_compiling() or self.is_outside_checkpoint:
            results = self.token_results("lse", "entropy")
        else:
            vectors = self.token_vectors.get("div_row"), self.cancelled_vector
            modes = self.differentiated_terms, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            key = *map(id, vectors), *self.normal_form[:2], *modes
            with self.gathered_weights():  # raises if the weights of cached results have changed
                if key not in self.cached_results:
                    # The cache holds the vectors, so that their ids are not used again.
                    self.cached_results[key] = vectors, self.token_results("lse", "entropy")
            results = self.cached_results[key][1]
        return results.lse, results.entropy

    def _call_operator(
        self, function: Callable[..., Any], target: Tensor | None, options: ChunkOptions | None,
        is_loss: bool = True, **spec: Any,
    ) -> Any:  # fmt: skip
        """Call one of flce's functions with the products, biases and normal form of this state.

        ``is_loss``: whether the result is a loss, which is counted as fused without a gradient, too.
        """
        products, biases = [], []
        dtype = self.terms[0].weight.dtype  # type: ignore[union-attr]
        requires_grad = self.count_result(is_loss)
        for term in self.resolved_terms:
            factor = term.factor
            if term.bias is not None:
                bias = term.bias.to(accumulation_dtype(dtype))
                biases.append(bias if factor == 1.0 else bias * factor)
            if term.hidden is not None and term.weight is not None:
                hidden, weights = term.hidden, term.weight
                hidden = hidden if factor == 1.0 else hidden * factor
                if self.autocast_dtype is None:  # cast an adapter in float32 to the dtype of the head
                    hidden, weights = hidden.to(dtype), weights.to(dtype)
                products.append((hidden, weights))
        if len(products) > 1:
            spec["adapters"] = tuple(products[1:])
        if self.division is not None:
            spec |= self.division.group_arguments
        hidden, weights = products[0]
        vector = self.cancelled_vector
        if requires_grad and vector is not None:  # it gets a gradient of zeros through `torch.where`
            always = torch.ones((), dtype=torch.bool, device=vector.device)
            hidden = torch.where(always, hidden, vector.to(hidden.dtype))
        target = None if target is None else target.to(self.product_device)
        spec |= {"linear_bias": sum(biases[1:], biases[0]) if biases else None, "options": options}
        spec |= {"logit_scale": self.normal_form.logit_scale, "softcap": self.normal_form.softcap}
        return self._in_head_autocast(function, hidden, weights, target, **spec)

    def _in_head_autocast(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function`` with the autocast state of the head's call."""
        device_type = self.product_device.type
        current_dtype = autocast_dtype(device_type)
        if current_dtype == self.autocast_dtype:
            return function(*args, **kwargs)
        enabled = self.autocast_dtype is not None
        with torch.autocast(device_type, dtype=self.autocast_dtype if enabled else current_dtype, enabled=enabled):
            return function(*args, **kwargs)


def head_state(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings | None = None,
    call: HeadCall | None = None, division: HeadDivision | None = None,
) -> LazyState:  # fmt: skip
    """Return the state of ``F.linear(hidden, weight, bias)``. ``call``: its record; None under the compiler.
    ``division``: the division of the head, whose weight and bias have the classes of this process."""
    device = hidden.device
    autocast = autocast_dtype(device.type)
    dtype = hidden.dtype if autocast is None else autocast_operand_dtype(hidden.dtype, device.type)
    terms = (Term(hidden, weight, bias),)
    state = LazyState(terms, dtype, autocast, device, settings or Settings(), division=division)
    return state if call is None else state.with_calls((call,))


def is_class_dim(state: LazyState, dim: Any) -> bool:
    return isinstance(dim, int) and normalized_dim(state, dim) == state.ndim - 1


def normalized_dim(state: LazyState, dim: int) -> int:
    if not -state.ndim <= dim < state.ndim:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-state.ndim}, {state.ndim - 1}], but got {dim})"
        )
    return dim % state.ndim
