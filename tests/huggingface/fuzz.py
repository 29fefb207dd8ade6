"""Programs, which run on a patched model and on the stock model. tests/search/lazy.py draws random programs.

A program is a few lines of Python with operations of users on logits: views, copies, writes, reads, losses. Both models
run the same lines. Shapes, values, gradients, and whether a line raises have to agree. Only public functions of flce
are called.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from types import CodeType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributions import Categorical

import flce
from tests.search.driver import Mismatch

WORDS = 9
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Tolerances by the least precise dtype in a program.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 0.15, torch.float16: 0.03}


# ------------------------------------------------------------------------------------------------- the programs


@dataclass(frozen=True)
class Setup:
    """The options of the models and of their call."""

    dtype: str = "float64"
    bias: bool = True
    shape: tuple[int, ...] = (2, 4)
    max_workspace_bytes: int | None = None
    head: tuple[int, int] = (13, 5)  # classes, and the hidden size
    frozen: str = ""  # the name of a parameter
    tied: bool = False
    adapter: bool = False  # on the head
    autocast: bool = False  # in the calls of the models
    mode: str = "train"  # or "labels": an evaluation with labels; "no_grad": the same without gradients


class Adapted(nn.Module):
    """A linear layer with an adapter, as in PEFT."""

    def __init__(self, base: nn.Linear, seed: int, dtype: str) -> None:
        super().__init__()
        self.base, self.out_features, self.enabled = base, base.out_features, True
        self.down = nn.Linear(base.in_features, 2, bias=False, device="meta")
        self.up = nn.Linear(2, base.out_features, bias=False, device="meta")
        self.down.weight = nn.Parameter(values((2, base.in_features), seed, dtype))
        self.up.weight = nn.Parameter(values((base.out_features, 2), seed + 1, dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.base(hidden)
        return logits + self.up(self.down(hidden)) * 0.5 if self.enabled else logits


class Head(nn.Module):
    """A minimal language model."""

    hidden: Tensor
    head: Any

    def __init__(self, setup: Setup, seed: int) -> None:
        super().__init__()
        classes, hidden = setup.head
        words = classes if setup.tied else WORDS
        self.embedding = nn.Embedding(words, hidden, _weight=values((words, hidden), seed, setup.dtype))
        self.trunk = nn.Parameter(values((hidden, hidden), seed + 1, setup.dtype))
        self.head = nn.Linear(hidden, classes, bias=setup.bias, device="meta", dtype=DTYPES[setup.dtype])
        weight = values((classes, hidden), seed + 2, setup.dtype)
        self.head.weight = self.embedding.weight if setup.tied else nn.Parameter(weight)
        if setup.bias:
            self.head.bias = nn.Parameter(values((classes,), seed + 3, setup.dtype))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name != setup.frozen)
        self.trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        if setup.adapter:
            self.head = Adapted(self.head, seed + 4, setup.dtype)
            self.trained = {name.replace("head.", "head.base.") for name in self.trained}

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        self.hidden = torch.tanh(self.embedding(ids) @ self.trunk) + 0.0  # a sum's backward does not need its result
        logits: Tensor = self.head(self.hidden)
        return logits


@functools.cache
def _drawn(shape: tuple[int, ...], seed: int, dtype: str) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DTYPES[dtype])


def values(shape: tuple[int, ...], seed: int, dtype: str) -> Tensor:
    return _drawn(shape, seed, dtype).clone()


def scaled(factor: int, gradient: int, forward: Callable[[Any, Tensor, int], Tensor]) -> Any:
    """Return an autograd function with a wrong gradient, which shows that its backward pass or a hook ran."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return forward(ctx, x, factor)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0] * gradient

    return Scaled


def write_then_mark(ctx: Any, x: Tensor, factor: int) -> Tensor:
    x.mul_(factor)
    ctx.mark_dirty(x)
    return x


def mark_then_write(ctx: Any, x: Tensor, factor: int) -> Tensor:
    ctx.mark_dirty(x)
    return x.mul_(factor)


Doubled = scaled(2, 3, lambda ctx, x, factor: x * factor)
DoubledInPlace, TripledInPlace = scaled(2, 3, write_then_mark), scaled(3, 4, mark_then_write)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        result: Tensor = gradients[0] * ctx.saved_tensors[0] * 2
        return result


class Tripled(torch.autograd.Function):
    """An autograd function that copies a tensor, as DDP's function for outputs, and triples its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, copy: Callable[[Tensor], Tensor]) -> Tensor:
        return copy(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * 3, None


@torch.library.custom_op("flce_fuzz::tanh", mutates_args=())
def custom_tanh(x: Tensor) -> Tensor:
    """Compute another function than the operation of PyTorch with the same name."""
    return x * 3.0


custom_tanh.register_autograd(lambda ctx, gradient: gradient * 5.0)


def hook(x: Tensor, function: Callable[[Tensor], Any]) -> None:
    _ = x.grad_fn  # see `Run.can_crash`
    x.register_hook(function)


def total(x: Tensor) -> Tensor:
    """Return a weighted sum of finite entries, which is differentiated."""
    if x.ndim == 0:
        return x.double()
    weights = _drawn(tuple(x.shape), 11, "float64").to(x.dtype)
    return (x.nan_to_num(0.0, 0.0, 0.0) * weights).sum().double()


def write_parts(x: Tensor) -> Tensor:
    """Write to many views in place, and return a sum of functions of them."""
    parts = [x[..., i, :] for i in range(x.shape[-2])]
    parts += [x[:1], x[..., 1:], x[..., 0], x.view(-1, x.shape[-1])[1:]]
    for factor, part in enumerate(parts):
        part.mul_(1 + factor / 10)
    return torch.stack([Doubled.apply(part).sum() for part in parts]).sum() + x


@functools.lru_cache(maxsize=4096)
def compiled(step: str) -> CodeType:
    return compile(step, "<step>", "exec")


class Run:
    """A program on one of the models, line by line."""

    def __init__(self, setup: Setup, patched: bool) -> None:
        self.setup, self.patched = setup, patched
        self.notes: list[tuple[str, Any]] = []
        self.code = ""
        self.hooked: list[tuple[str, Tensor]] = []
        self.retained: list[Tensor] = []
        self.learned: list[tuple[str, Tensor]] = []
        self.models: dict[str, Head] = {}
        self.before: dict[str, list[Tensor]] = {}
        self.globals: dict[str, Any] = {
            **TOOLS,
            "a": lambda ids: self._forward("a", ids),
            "b": lambda ids: self._forward("b", ids),
            "ids": torch.arange(math.prod(setup.shape)).mul(5).remainder(WORDS).view(setup.shape),
            "note": self._note,
            "keep": self._keep,
            "retain": self._retain,
            "noise": self._noise,
            "scalar": self._scalar,
            "learned": self._learned,
            "row": lambda x: self._noise(x.shape[:-1]).unsqueeze(-1),
            "temperatures": lambda x: self._noise(x.shape[:-1]).unsqueeze(-1).abs() + 0.5,
            "spike": self._spike,
            "requires_grad": self._requires_grad,
            "adapter": self._adapter,
            "model": lambda: self._model("a"),
            "rescale_hidden": lambda number: self._each(lambda model: model.hidden.mul_(number)),
            "rescale_hidden_data": lambda number: self._each(lambda model: model.hidden.data.mul_(number)),
        }
        self.tensors: dict[str, Any] = {}
        self.written: dict[str, int] = {"lg": 0}
        self.step("lg = a(ids)")

    def _model(self, name: str) -> Head:
        if name not in self.models:
            model = Head(self.setup, 100 if name == "a" else 200).train(self.setup.mode == "train")
            self.before[name] = [p.detach().clone() for p in model.parameters()]
            if self.patched:
                options = flce.ChunkOptions(max_workspace_bytes=self.setup.max_workspace_bytes)
                flce.patch_model(model, options=options, on_materialize="ignore")
            self.models[name] = model
        return self.models[name]

    def _forward(self, name: str, ids: Tensor) -> Tensor:
        given = {} if self.setup.mode == "train" else {"labels": ids}
        enabled = self.setup.mode != "no_grad" and torch.is_grad_enabled()
        with torch.set_grad_enabled(enabled), autocast() if self.setup.autocast else contextlib.nullcontext():
            logits: Tensor = self._model(name)(ids, **given)
        return logits

    def _each(self, change: Callable[[Head], Any]) -> None:
        for model in self.models.values():
            change(model)

    def _requires_grad(self, trained: bool, part: str = "") -> None:
        """Freeze trained parameters whose names begin with ``part``, or undo this."""
        for model in self.models.values():
            for name, parameter in model.named_parameters():
                if name in model.trained and name.startswith(part):
                    parameter.requires_grad_(trained)

    def _adapter(self, enabled: bool) -> None:
        """Enable or disable the adapter as PEFT does. The parameters of a disabled adapter are frozen."""
        for model in self.models.values():
            if isinstance(model.head, Adapted):
                model.head.enabled = enabled
                for layer in (model.head.down, model.head.up):
                    layer.requires_grad_(enabled)

    def _note(self, *what: Any) -> None:
        self.notes += [(self.code, x.copy() if isinstance(x, np.ndarray) else x) for x in what]

    def _keep(self, name: str) -> Callable[[Tensor], None]:
        return lambda gradient: self.hooked.append((name, gradient.detach().clone()))

    def _retain(self, x: Tensor) -> None:
        _ = x.grad_fn
        x.retain_grad()
        self.retained.append(x)

    def _noise(self, shape: Any) -> Tensor:
        return values((shape,) if isinstance(shape, int) else tuple(shape), 7, self.setup.dtype)

    def _scalar(self, number: float) -> Tensor:
        return torch.tensor(number, dtype=DTYPES[self.setup.dtype])

    def _learned(self, x: Tensor) -> Tensor:
        """Return a leaf whose gradient is compared."""
        leaf = x.detach().clone().requires_grad_()
        self.learned.append((self.code, leaf))
        return leaf

    def _spike(self, x: Tensor, number: float) -> Tensor:
        spike = self._noise(x.shape[-1:])
        spike[-1] = number
        return spike

    def step(self, code: str) -> None:
        self.code = code
        exec(compiled(code), self.globals, self.tensors)

    def watch(self, step: str) -> None:
        """Count the writes of a line to tensors by in-place methods."""
        for name in tensor_names(step):
            x = self.tensors.get(name)
            if x is None or name in assigned_names(step):
                self.written[name] = 0
            elif re.search(rf"\b{name}(\.\w+_\(| [-+*/]= )", step):
                self.written[name] += 1

    def can_crash(self, step: str) -> bool:
        """Return True if PyTorch 2.13 can crash: a hook is on a tensor that was written to through a view, and the
        tensor's `grad_fn` was not read since."""
        if not HOOKS.search(step):
            return False
        return any(n in self.tensors and self.tensors[n]._version != self.written[n] for n in tensor_names(step))

    def backward(self, roots: Sequence[str]) -> None:
        sums = [total(self.tensors[name]) for name in roots if self.tensors[name].requires_grad]
        if sums:
            torch.stack(sums).sum().backward()

    def gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        for letter, model in self.models.items():
            for name, parameter in model.named_parameters():
                yield f"gradient of {letter}.{name}", parameter.grad
        for x in self.retained:
            yield "retained gradient", x.grad
        for code, x in self.learned:
            yield f"gradient of a factor or a vector in `{code}`", x.grad
        hooked = sorted(self.hooked, key=itemgetter(0))  # hooks of two tensors may run in any order
        yield f"calls of hooks: {[name for name, _ in hooked]}", None
        yield from ((f"gradient in the hook of {name}", gradient) for name, gradient in hooked)

    def read(self) -> Iterator[tuple[str, Any]]:
        """Yield the notes and the values of all tensors."""
        for code, what in self.notes:
            yield f"`{code}`", what
        for name, x in self.tensors.items():
            yield name, _result(lambda x=x: x.tolist())  # type: ignore[misc]

    def properties(self, name: str, layout: bool) -> dict[str, Any]:
        """Return the properties of a tensor without its values."""
        x = self.tensors[name]
        properties = {
            "type": isinstance(x, Tensor),
            "shape": tuple(x.shape),
            "dtype": x.dtype,
            "gradient": x.requires_grad,
        }
        memory_layout = {"strides": x.stride(), "contiguity": x.is_contiguous(), "offset": x.storage_offset()}
        return {**properties, **memory_layout} if layout else properties

    def parameters_changed(self) -> bool:
        return not all(
            torch.equal(before, now)
            for name, model in self.models.items()
            for before, now in zip(self.before[name], model.parameters(), strict=True)
        )


def bits(shape: Sequence[int]) -> Tensor:
    """Return a mask that leaves the first class to some tokens."""
    mask = _drawn(tuple(shape), 5, "float64") > 0.4
    if mask.ndim:
        mask[..., 0] &= not mask[..., 0].all()
    return mask


def index(x: Tensor, dim: int) -> Tensor:
    """Return the last and the first index of a dimension."""
    size = x.shape[dim]
    return torch.tensor([size - 1, 0])[: max(size, 1)]


def labels(x: Tensor) -> Tensor:
    """Return labels, of which some are ignored."""
    rows = math.prod(x.shape[:-1])
    flat = torch.arange(rows).mul(7).add(3).remainder(x.shape[-1])
    flat[2::5] = -100
    return flat.view(x.shape[:-1])


def chosen(x: Tensor) -> Tensor:
    """Return an index for `gather` with one class for each token."""
    return labels(x).clamp_min(0).unsqueeze(-1)


def loss_of(x: Tensor) -> Tensor:
    """Return the loss of the next token."""
    return F.cross_entropy(x[:, :-1].flatten(0, -2), labels(x)[:, 1:].flatten())


def few(x: Tensor) -> Tensor:
    """Return an index for `gather` with four classes for each token."""
    return torch.arange(4 * math.prod(x.shape[:-1])).view(*x.shape[:-1], 4) * 7 % x.shape[-1]


def tangent(x: Tensor) -> float:
    """Return the derivative of a sum in the direction of a factor."""
    with forward_ad.dual_level():
        factor = forward_ad.make_dual(torch.tensor(2.0, dtype=x.dtype), torch.tensor(1.0, dtype=x.dtype))
        return float(forward_ad.unpack_dual((x * factor).tanh().sum()).tangent)


def close(few: Tensor, x: Tensor) -> bool:
    """Return True if values that were read first equal values of the real logits up to rounding."""
    tolerance = torch.finfo(torch.bfloat16).eps  # the logits may have been rounded to bfloat16 before
    values = x.sort(-1).values.gather(-1, x.argsort(-1).argsort(-1).gather(-1, chosen(x)))
    return torch.allclose(few, values, tolerance, tolerance)


def autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def picked(x: Tensor) -> Tensor:
    return x.log_softmax(-1).gather(-1, chosen(x)).squeeze(-1)


def entropy(x: Tensor) -> Tensor:
    logprob = torch.log_softmax(x, dim=-1)
    return -(logprob.exp() * logprob).sum(-1)


FUNCTIONS = (copy, pickle, functools, flce, Categorical, Squared, Tripled, hook, bits, index, labels, chosen, autocast)
TOOLS: dict[str, Any] = {
    **{each.__name__: each for each in (*FUNCTIONS, picked, entropy, loss_of, write_parts, tangent, few, close)},
    "torch": torch,
    "F": F,
    "nn": nn,
    "np": np,
    "custom_tanh": custom_tanh,
    "Doubled": Doubled,
    "DoubledInPlace": DoubledInPlace,
    "TripledInPlace": TripledInPlace,
}


# ---------------------------------------------------------------------------------------------------- comparing


def _same(got: Any, want: Any, tolerance: float) -> str | None:
    """Return the first difference between two nested values of lists, numbers and arrays, or None."""
    if isinstance(want, Tensor):
        if not isinstance(got, Tensor):
            return f"{type(got).__name__} instead of a tensor"
        if (got.shape, got.dtype) != (want.shape, want.dtype):
            return f"{tuple(got.shape)} {got.dtype} instead of {tuple(want.shape)} {want.dtype}"
        got, want = got.detach().double().numpy(), want.detach().double().numpy()
    if isinstance(want, Exception):
        return None  # autograd forbids reading this view
    if isinstance(want, bool | str | torch.dtype | torch.layout | torch.Size | type(None)):
        return None if type(got) is type(want) and got == want else f"{got} instead of {want}"
    if isinstance(got, Exception):
        return None if STALE.search(str(got)) else _error_text(got)
    if isinstance(want, list | tuple) and not (want and all(type(w) in (int, float) for w in want)):
        if len(got) != len(want):
            return f"{len(got)} instead of {len(want)}"
        return next((d for g, w in zip(got, want, strict=True) if (d := _same(g, w, tolerance))), None)
    w, g = np.asarray(want), np.asarray(got)
    if g.shape != w.shape or (g.dtype == bool) != (w.dtype == bool):
        return f"{g.dtype} {g.shape} instead of {w.dtype} {w.shape}"
    g, w = g.astype(np.float64), w.astype(np.float64)
    finite = np.abs(w[np.isfinite(w)])
    allowed = tolerance * (1 + float(finite.max() if finite.size else 0.0))
    wrong = ~np.isclose(g, w, rtol=0.0, atol=allowed, equal_nan=True)
    return f"{g[wrong][0]} instead of {w[wrong][0]}, {wrong.sum()} of {w.size}" if wrong.any() else None


# Documented: after the loss no gradient passes through lazy logits, so a request for one is an error.
HOOKS = re.compile(r"hook\(|retain\(")
REFUSED_AFTER_LOSS = "after the loss"
# Errors of autograd about views of one memory.
VIEW_RULES = re.compile(
    r"created in no_grad mode|output of a function that returns multiple views|a leaf Variable"
    # Strides may differ if they do not matter.
    r"|refer to a single memory location|view size is not compatible"
)
# Writes that autograd does not notice: stock then computes gradients for another value.
UNTRACKED_WRITE = re.compile(r"\.data\b|numpy\(\)\.fill|hidden_data\(")
# Documented: an error if hidden states have changed that are still needed. For some views PyTorch raises it.
STALE = re.compile(
    r"no longer be computed: the hidden states were changed|its base or another view of its base has been"
)
# PyTorch's error for the hidden states that a fused loss has saved. For a frozen head, stock saves none.
MODIFIED_IN_PLACE = "modified by an inplace operation"
# Documented: an error if a hook is set after the logits were passed to an autograd.Function.
HOOKED_LATE = "a hook was set on logits"
# Documented: an error if an autograd.Function gets logits that were written to through a view of the real logits.
WRITTEN_UNSEEN = "of logits that were written to through a view"
# Patterns of writes with the written name.
WRITE = re.compile(
    r"\b(\w+)(?:\[.*\]|\.\w+\(\))*(?:\.[a-z]\w*_\(| [-+*/]= |\[.*\] = )|InPlace\.apply\((\w+)\)|out=(\w+)"
    r"|F\.\w+\((\w+), inplace=True"
)


def _is_beyond_limits(steps: Sequence[str], loose: set[str]) -> bool:
    """Return True if gradients cannot be compared, because of limits of PyTorch: after an in-place change of a tensor,
    a hook that was set before runs or not, depending on whether the tensor is a view."""
    hooked: set[str] = set()
    for step in steps:
        writes = {name for names in WRITE.findall(step) for name in names if name}
        if re.search(r"(\]|\b(detach|view|flatten|unsqueeze)\(.*\))\.\w+_\(", step):
            writes.add("a view")
        if HOOKS.search(step):
            hooked.update(tensor_names(step))
        if (hooked and writes) or (loose and "InPlace" in step):
            return True
    return False


def error_of(action: Callable[[], Any]) -> Exception | None:
    try:
        action()
    except Exception as error:
        return error
    return None


def _error_text(error: Exception | None) -> str:
    return "nothing" if error is None else f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _result(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as error:
        return error


def compare(
    setup: Setup,
    steps: Sequence[str],
    roots: Sequence[str] = (),
    read_first: bool = False,
    *,
    layout: bool = False,
    limits: bool = True,
    tolerance: float | None = None,
    run: type[Run] = Run,
) -> None:
    """Run a program on both models. Raise Mismatch for the first difference.

    Args:
        setup: of the models.
        steps: the lines after `lg = a(ids)`.
        roots: names of the results that are differentiated.
        read_first: whether values are read before the backward pass or after it.
        layout: whether strides have to agree too, and errors of autograd about views.
        limits: whether results may differ beyond the documented limits of flce and of PyTorch.
        tolerance: replaces the tolerance of the least precise dtype.
        run: the class that runs a program on the patched model.
    """
    stock, lazy = Run(setup, False), run(setup, True)
    # For views that were created without gradients, PyTorch returns requires_grad=True, but computes no gradient.
    loose: set[str] = set()
    for step in steps:
        if stock.can_crash(step):
            continue
        want, got = error_of(lambda step=step: stock.step(step)), error_of(lambda step=step: lazy.step(step))  # type: ignore[misc]
        if (want is None) != (got is None) and limits:
            if STALE.search(str(got)) and any("rescale_hidden" in before for before in steps):
                return
            if want is None and HOOKS.search(step) and REFUSED_AFTER_LOSS in str(got):
                return
            unsure = loose.intersection(tensor_names(step))  # whether a view of a leaf is one that requires a gradient
            if want is None and unsure and (HOOKS.search(step) or VIEW_RULES.search(str(got))):
                return
            if want is None and WRITTEN_UNSEEN in str(got):
                return
            if (VIEW_RULES.search(str(want)) and not layout) or "max_workspace_bytes" in str(got):
                return
        if (want is None) != (got is None):
            kind = "patched raises" if want is None else "stock raises"
            raise Mismatch(kind, f"at `{step}`: {_error_text(got if want is None else want)}")
        if want is not None:
            if limits:
                return
            raise Mismatch("both raise", f"at `{step}`: {_error_text(want)}")
        stock.watch(step)
        new = set(assigned_names(step))
        taken = tensor_names(step.split(" = ")[-1])
        if ".requires_grad_()" in step:  # views of a leaf require gradients then, but not views of a detached view
            loose |= set(stock.tensors)
        elif "no_grad" in step or loose.intersection(taken):
            loose |= new
        else:
            loose -= new
        for name in tensor_names(step):
            if name not in stock.tensors:
                continue
            theirs = _result(lambda name=name: stock.properties(name, layout))  # type: ignore[misc]
            if isinstance(theirs, Exception):
                continue
            ours = _result(lambda name=name: lazy.properties(name, layout))  # type: ignore[misc]
            if STALE.search(str(ours)):
                return
            if isinstance(ours, Exception):
                raise Mismatch("properties raise", f"{name} after `{step}`: {_error_text(ours)}")
            for what in ours:
                if ours[what] != theirs[what] and not (what == "gradient" and name in loose):
                    raise Mismatch(what, f"{name} after `{step}`: {ours[what]} instead of {theirs[what]}")
    is_bfloat16 = setup.autocast or any(re.search("autocast.*ids", step) for step in steps)
    allowed = tolerance or max(
        [TOLERANCE[torch.bfloat16 if is_bfloat16 else DTYPES[setup.dtype]]]
        + [TOLERANCE.get(x.dtype, 0.0) for x in stock.tensors.values()]
        + [TOLERANCE[dtype] for name, dtype in DTYPES.items() if any(name in step for step in steps)]
        + [TOLERANCE[torch.float32] for step in steps if ".float()" in step]
        + [TOLERANCE[torch.float16] for step in steps if ".half()" in step]
    )

    def compare_values() -> None:
        for (name, want), (_, got) in zip(stock.read(), lazy.read(), strict=True):
            difference = _same(got, want, allowed)
            unsaid = re.search(r"InPlace\.apply|grad_fn|is_leaf", name) and (loose or "no_grad" in name)
            # A rounding error divided by 0.
            unsaid = unsaid or (setup.head[0] == 1 and any("/ 0" in step for step in steps))
            if difference is not None and not unsaid:
                raise Mismatch("note" if "note" in name else "value", f"{name}: {difference}")

    def compare_gradients() -> None:
        want, got = error_of(lambda: stock.backward(roots)), error_of(lambda: lazy.backward(roots))
        if limits and (want is not None or any(map(UNTRACKED_WRITE.search, steps)) or _is_beyond_limits(steps, loose)):
            return  # stock cannot differentiate this, but flce may
        message = _error_text(got if want is None else want)
        if limits and (
            STALE.search(message)
            or (MODIFIED_IN_PLACE in message and any("rescale_hidden" in step for step in steps))
            or HOOKED_LATE in message
            or ("does not require" in message and loose)
        ):
            return
        if want is not None or got is not None:
            raise Mismatch("backward raises", message)
        for (name, g), (expected, w) in zip(lazy.gradients(), stock.gradients(), strict=False):
            if name != expected:
                raise Mismatch("hooks", f"{name} instead of {expected}")
            if w is None or g is None:
                difference = None if w is g else f"{'None' if g is None else 'a tensor'} instead of the other"
            else:
                difference = _same(g, w, allowed)
            if difference is not None:
                raise Mismatch("gradient", f"{name}: {difference}")

    for read in (compare_values, compare_gradients)[:: 1 if read_first else -1]:
        read()
    if lazy.parameters_changed():
        raise Mismatch("parameters", "a parameter was written to")


def tensor_names(step: str) -> list[str]:
    """Return the names of the tensors in a line, in order."""
    return list(dict.fromkeys(re.findall(r"\b(?:lg|t\d+|loss\d+)\b", step)))


def assigned_names(step: str) -> list[str]:
    """Return the names that a line assigns or deletes."""
    return [n for n in tensor_names(step) if re.match(rf"(.*: )?(\w+, )?{n}(, \w+)? = |del {n}", step)]
