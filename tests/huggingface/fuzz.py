"""Random programs, which run on a patched model and on the stock model: the search's kind `lazy`.

A program is a few lines of Python with operations of users on logits: views, copies, writes, reads, losses. Its lines
are drawn from the table in `operations`. Both models run the same lines. Shapes, values, gradients, and whether a line
raises have to agree. Only public functions of flce are called.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import pickle
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
from tests.huggingface.operations import OPERATIONS

WORDS = 9
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Tolerances by the least precise dtype in a program.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 0.15, torch.float16: 0.03}

# How often each group is drawn.
WEIGHTS = {
    "views": 22,
    "copies": 12,
    "arithmetic": 14,
    "reductions": 7,
    "together": 8,
    "heads": 4,
    "models": 3,
    "writes": 18,
    "rare": 1,
    "reads": 6,
    "losses": 14,
    "divergences": 4,
    "autograd": 5,
}
# Programs of two models: their share, how often they draw the group of divergences, and their first line.
SHARE_OF_TWO, DIVERGENCES_OF_TWO = 0.25, 200
SECOND_LOGITS = ["b(ids)", "b(ids)", "b(ids).detach()", "b(ids).detach()", "b(ids.flip(0))", "a(ids)", "lg.detach()"]

BY_GROUP = {group: [each.code for each in OPERATIONS if each.group == group] for group in WEIGHTS}

NUMBERS = ["0.5", "2", "-1.5", "3.0", "0.25"]
MASKS = ["float('-inf')", "float('-inf')", "-1e4", "3.0", "0.0"]
# Parts of divergences.
LOGITS = ["{0}"] * 8 + ["{0}.detach()"] * 3
LOGITS += ["({0} / 2)", "({0} * -0.5)", "({0} / temperatures({0}))", "({0} / (2 * temperatures({0})))", "{0}.float()"]
LOGPROBS = ["{0}.log_softmax(-1)"] * 6 + ["{0}.log_softmax(-1).detach()"] * 2 + ["Categorical(None, {0}).logits"]
PROBABILITIES = ["{0}.softmax(-1)"] * 4 + ["{0}.softmax(-1).detach()"] * 2
PROBABILITIES += ["{0}.log_softmax(-1).exp()", "Categorical(None, {0}).probs"]
SLICES = ["1:", ":-1", "::2", "-1:", ":1", "1:2", ":0"]
FILLED = torch.tensor([float(n) for n in NUMBERS] + [-1e4, 3.0], dtype=torch.float64)
# Results that depend on rounding if the numbers have low precision.
DISCRETE = re.compile(r"arg|topk|max|min\(|sort|[<>] |==|equal|relu|clamp|> 0|floor|long\(|/ \{x")


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

    def __str__(self) -> str:
        plain = Setup()
        fields = [f"{k}={v!r}" for k, v in self.__dict__.items() if v != getattr(plain, k)]
        return f"Setup({', '.join(fields)})"


@dataclass(frozen=True)
class Program:
    setup: Setup
    steps: tuple[str, ...]
    roots: tuple[str, ...]  # names of the results that are differentiated
    read_first: bool  # whether values are read before the backward pass or after it

    def __str__(self) -> str:
        lines = [f"# {self.setup}", "lg = a(ids)", *self.steps]
        reads = ["# (every value is read)"]
        backward = [f"({' + '.join(f'total({name})' for name in self.roots)}).backward()"] if self.roots else []
        return "\n".join(lines + (reads + backward if self.read_first else backward + reads))


@dataclass(frozen=True)
class Difference:
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


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


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 3  # a wrong gradient, which shows that the hook was called


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        result: Tensor = gradients[0] * ctx.saved_tensors[0] * 2
        return result


class DoubledInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 3


class TripledInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 4


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
        for name in _tensor_names(step):
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
        return any(n in self.tensors and self.tensors[n]._version != self.written[n] for n in _tensor_names(step))

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


TOOLS: dict[str, Any] = {
    "torch": torch,
    "F": F,
    "nn": nn,
    "np": np,
    "copy": copy,
    "pickle": pickle,
    "Doubled": Doubled,
    "Squared": Squared,
    "DoubledInPlace": DoubledInPlace,
    "TripledInPlace": TripledInPlace,
    "hook": hook,
    "bits": bits,
    "index": index,
    "labels": labels,
    "chosen": chosen,
    "autocast": autocast,
    "picked": picked,
    "entropy": entropy,
    "Categorical": Categorical,
    "loss_of": loss_of,
    "write_parts": write_parts,
    "tangent": tangent,
    "few": few,
    "close": close,
    "Tripled": Tripled,
    "custom_tanh": custom_tanh,
    "flce": flce,
    "functools": functools,
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
    if not w.size or (g == w).all():
        return None
    g, w = g.astype(np.float64), w.astype(np.float64)
    finite = np.isfinite(w)
    if not (np.array_equal(np.isnan(g), np.isnan(w)) and np.array_equal(g[np.isinf(w)], w[np.isinf(w)])):
        return "NaN or infinities in other places"
    if not (finite == np.isfinite(g)).all():
        return "infinities in other places"
    if not finite.any():
        return None
    off = float(np.abs(g - w)[finite].max())
    if off <= tolerance * (1 + float(np.abs(w[finite]).max())):
        return None
    return f"off by {off:.2g}"


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
# Patterns of writes with the written name, and of arguments of C++ code.
WRITE = re.compile(
    r"\b(\w+)(?:\[.*\]|\.\w+\(\))*(?:\.[a-z]\w*_\(| [-+*/]= |\[.*\] = )|InPlace\.apply\((\w+)\)|out=(\w+)"
    r"|F\.\w+\((\w+), inplace=True"
)
FUNCTION_ARGUMENT = re.compile(r"\.apply\((\w+)|checkpoint\(.*, (\w+), ")


def _is_beyond_limits(steps: Sequence[str], loose: set[str]) -> bool:
    """Return True if gradients cannot be compared, because of limits of flce (docs/support.md) or of PyTorch.

    flce: autograd.Functions of logits that were read, and then written to through a view of them.
    PyTorch: after an in-place change of a tensor, a hook that was set before runs or not, depending on whether the
    tensor is a view.
    """
    written: set[str] = set()
    hooked: set[str] = set()
    for step in steps:
        now = {name for names in FUNCTION_ARGUMENT.findall(step) for name in names if name}
        writes = {name for names in WRITE.findall(step) for name in names if name}
        if re.search(r"(\]|\b(detach|view|flatten|unsqueeze)\(.*\))\.\w+_\(", step):
            writes.add("a view")
        if HOOKS.search(step):
            hooked.update(_tensor_names(step))
        if (now and written - now) or (hooked and writes) or (loose and "InPlace" in step):
            return True
        written |= writes
    return False


def _fails(action: Callable[[], Any]) -> Exception | None:
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


@dataclass(frozen=True)
class Comparison:
    """Options of a comparison of programs.

    Attributes:
        layout: whether strides have to agree too, and errors of autograd about views.
        limits: whether gradients may differ beyond the documented limits of flce and of PyTorch.
        tolerance: a tolerance that replaces the one of the least precise dtype.
        run: the class that runs a program on the patched model.
    """

    layout: bool = False
    limits: bool = True
    tolerance: float | None = None
    run: type[Run] = Run


DEFAULT_COMPARISON = Comparison()


def compare(program: Program, how: Comparison = DEFAULT_COMPARISON) -> Difference | None:
    """Run a program on both models. Returns the first difference, if there is one."""
    stock, lazy = Run(program.setup, False), how.run(program.setup, True)
    # For views that were created without gradients, PyTorch returns requires_grad=True, but computes no gradient.
    loose: set[str] = set()
    for step in program.steps:
        if stock.can_crash(step):
            continue
        want, got = _fails(lambda step=step: stock.step(step)), _fails(lambda step=step: lazy.step(step))  # type: ignore[misc]
        if (want is None) != (got is None) and how.limits:
            if STALE.search(str(got)) and any("rescale_hidden" in before for before in program.steps):
                return None
            if want is None and HOOKS.search(step) and REFUSED_AFTER_LOSS in str(got):
                return None
            unsure = loose.intersection(_tensor_names(step))  # whether a view of a leaf is one that requires a gradient
            if want is None and unsure and (HOOKS.search(step) or VIEW_RULES.search(str(got))):
                return None
            if (VIEW_RULES.search(str(want)) and not how.layout) or "max_workspace_bytes" in str(got):
                return None
        if (want is None) != (got is None):
            kind = "patched raises" if want is None else "stock raises"
            return Difference(kind, f"at `{step}`: {_error_text(got if want is None else want)}")
        if want is not None:
            return None if how.limits else Difference("both raise", f"at `{step}`: {_error_text(want)}")
        stock.watch(step)
        new = set(assigned_names(step))
        taken = _tensor_names(step.split(" = ")[-1])
        if ".requires_grad_()" in step:  # views of a leaf require gradients then, but not views of a detached view
            loose |= set(stock.tensors)
        elif "no_grad" in step or loose.intersection(taken):
            loose |= new
        else:
            loose -= new
        for name in _tensor_names(step):
            if name not in stock.tensors:
                continue
            theirs = _result(lambda name=name: stock.properties(name, how.layout))  # type: ignore[misc]
            if isinstance(theirs, Exception):
                continue
            ours = _result(lambda name=name: lazy.properties(name, how.layout))  # type: ignore[misc]
            if STALE.search(str(ours)):
                return None
            if isinstance(ours, Exception):
                return Difference("properties raise", f"{name} after `{step}`: {_error_text(ours)}")
            for what in ours:
                if ours[what] != theirs[what] and not (what == "gradient" and name in loose):
                    return Difference(what, f"{name} after `{step}`: {ours[what]} instead of {theirs[what]}")
    is_bfloat16 = program.setup.autocast or any(re.search("autocast.*ids", step) for step in program.steps)
    tolerance = how.tolerance or max(
        [TOLERANCE[torch.bfloat16 if is_bfloat16 else DTYPES[program.setup.dtype]]]
        + [TOLERANCE.get(x.dtype, 0.0) for x in stock.tensors.values()]
        + [TOLERANCE[dtype] for name, dtype in DTYPES.items() if any(name in step for step in program.steps)]
        + [TOLERANCE[torch.float32] for step in program.steps if ".float()" in step]
        + [TOLERANCE[torch.float16] for step in program.steps if ".half()" in step]
    )
    reads = [_values, _gradients] if program.read_first else [_gradients, _values]
    for read in reads:
        difference = read(program, stock, lazy, tolerance, loose, how)
        if difference is not None:
            return difference
    if lazy.parameters_changed():
        return Difference("parameters", "a parameter was written to")
    return None


def _values(
    program: Program, stock: Run, lazy: Run, tolerance: float, loose: set[str], how: Comparison
) -> Difference | None:
    for (name, want), (_, got) in zip(stock.read(), lazy.read(), strict=True):
        difference = _same(got, want, tolerance)
        unsaid = re.search(r"InPlace\.apply|grad_fn|is_leaf", name) and (loose or "no_grad" in name)
        # A rounding error divided by 0.
        unsaid = unsaid or (program.setup.head[0] == 1 and any("/ 0" in step for step in program.steps))
        if difference is not None and not unsaid:
            return Difference("note" if "note" in name else "value", f"{name}: {difference}")
    return None


def _gradients(
    program: Program, stock: Run, lazy: Run, tolerance: float, loose: set[str], how: Comparison
) -> Difference | None:
    want, got = _fails(lambda: stock.backward(program.roots)), _fails(lambda: lazy.backward(program.roots))
    if how.limits and (
        want is not None or any(map(UNTRACKED_WRITE.search, program.steps)) or _is_beyond_limits(program.steps, loose)
    ):
        return None  # stock cannot differentiate this, but flce may
    message = _error_text(got if want is None else want)
    if how.limits and (
        STALE.search(message)
        or (MODIFIED_IN_PLACE in message and any("rescale_hidden" in step for step in program.steps))
        or HOOKED_LATE in message
        or ("does not require" in message and loose)
    ):
        return None
    if want is not None or got is not None:
        return Difference("backward raises", message)
    ours = list(lazy.gradients())
    theirs = list(stock.gradients())
    for (name, g), (expected, w) in zip(ours, theirs, strict=False):
        if name != expected:
            return Difference("hooks", f"{name} instead of {expected}")
        if w is None or g is None:
            difference = None if w is g else f"{'None' if g is None else 'a tensor'} instead of the other"
        else:
            difference = _same(g, w, tolerance)
        if difference is not None:
            return Difference("gradient", f"{name}: {difference}")
    return None


# ------------------------------------------------------------------------------------------ drawing and shrinking


class Unsuitable(Exception):
    """No value can be drawn for a placeholder."""


class Draw(dict[str, str]):
    """The values of an operation's placeholders, each drawn at its first read."""

    def __init__(self, rng: random.Random, tensors: dict[str, Any], fresh: Iterator[int]) -> None:
        self.rng, self.tensors, self.fresh = rng, tensors, fresh

    def __missing__(self, key: str) -> str:
        self[key] = drawn = DRAW_BY_KEY[key](self)
        return drawn

    def pick(self, suits: Callable[[Tensor], bool]) -> str:
        is_empty = self.rng.random() < 0.3  # whether it may be
        names = [
            name
            for name, x in self.tensors.items()
            if x.is_floating_point() and x.ndim and (x.numel() or is_empty) and suits(x)
        ]
        if not names:
            raise Unsuitable
        # Errors need chains: most lines use the result of the previous line, or the model's logits.
        return self.rng.choices([names[-1], names[0], self.rng.choice(names)], [40, 25, 35])[0]

    def new(self) -> str:
        if self.rng.random() < 0.12:
            return self.rng.choice([n for n in self.tensors if not n.startswith("loss")] or ["lg"])
        return f"t{next(self.fresh)}"

    def other(self) -> str:
        main = self.main()
        if self.rng.random() < 0.1:
            return next(name for name, x in self.tensors.items() if x is main)
        return self.pick(lambda x: x is not main and x.shape == main.shape)

    def part(self, templates: Sequence[str] = ("{0}",)) -> str:
        """Return a function of the logits, or of another tensor of their shape."""
        name = self["g"]
        with contextlib.suppress(Unsuitable):
            name = self.rng.choice([name, name, self["o"]])
        return self.rng.choice(templates).format(self.rng.choice(LOGITS).format(name))

    def below(self, size: int) -> str:
        if not size:
            raise Unsuitable
        return str(self.rng.randrange(size))

    def dimension(self) -> str:
        return str(self.rng.randrange(-self.main().ndim, self.main().ndim))

    def operands(self) -> list[Tensor]:
        return [self.tensors[self[key]] for key in "xglo" if key in self]

    def main(self) -> Tensor:
        """Return the tensor that the operation is applied to."""
        operands = self.operands()
        return operands[0] if operands else self.tensors[self["x"]]


# A function for each placeholder, which draws its value.
DRAW_BY_KEY: dict[str, Callable[[Draw], str]] = {
    "x": lambda draw: draw.pick(lambda x: x.numel() < 1500 and x.ndim < 6),
    "g": lambda draw: draw.pick(lambda x: x.ndim > 1 and x.shape[-1] > 1 and x.numel() < 1500),
    "l": lambda draw: draw.pick(lambda x: x.shape == (2, 4, 13)),
    "o": Draw.other,
    "y": Draw.new,
    "z": lambda draw: f"t{next(draw.fresh)}",
    "loss": lambda draw: f"loss{next(draw.fresh)}",
    "n": lambda draw: draw.rng.choice(NUMBERS),
    "inf": lambda draw: draw.rng.choice(MASKS),
    "d": Draw.dimension,
    "e": Draw.dimension,
    "i": lambda draw: draw.below(draw.main().shape[int(draw["d"])]),
    "i0": lambda draw: draw.below(draw.main().shape[0]),
    "c": lambda draw: draw.below(draw.main().shape[-1]),
    "p": lambda draw: ", ".join(map(str, draw.rng.sample(range(draw.main().ndim), draw.main().ndim))),
    "s": lambda draw: draw.rng.choice(SLICES),
    "part": Draw.part,
    "logp": lambda draw: draw.part(LOGPROBS),
    "logq": lambda draw: draw.part(LOGPROBS),
    "probs": lambda draw: draw.part(PROBABILITIES),
    "t": lambda draw: "torch." + draw.rng.choice(["float64", "float64", "float32", "bfloat16"]),
}


def _draw_setup(rng: random.Random) -> Setup:
    bias = rng.random() < 0.5
    names = ["embedding.weight", "trunk", "head.weight"] + (["head.bias"] if bias else [])
    tied = rng.random() < 0.05
    dtype = rng.choices(["float64", "float32", "bfloat16"], [85, 12, 3])[0]
    return Setup(
        dtype=dtype,
        bias=bias,
        shape=rng.choices([(2, 4), (8,), (3, 1), (1, 5), (2, 2, 2), (0, 4), (0,)], [66, 10, 5, 10, 5, 3, 1])[0],
        max_workspace_bytes=rng.choice([None, 3000]),
        head=(13, 5) if tied else rng.choices([(13, 5), (5, 5), (13, 1), (5, 1), (1, 5)], [80, 8, 5, 4, 3])[0],
        frozen=rng.choice(names) if not tied and rng.random() < 0.15 else "",
        tied=tied,
        adapter=rng.random() < 0.2,
        autocast=dtype == "float32" and rng.random() < 0.4,
        mode=rng.choices(["train", "labels", "no_grad"], [85, 10, 5])[0],
    )


def _has_ties(x: Any) -> bool:
    """Return True if rounding decides the order of two entries, or the sign of one."""
    numbers = x.detach().double().flatten()
    numbers = numbers[numbers.isfinite()].sort().values
    rounded = (numbers.diff().abs() < 1e-6) | (numbers[1:].abs() < 1e-6)
    return bool((rounded & ~torch.isin(numbers[1:], FILLED)).any())


def _is_rounding(x: Tensor) -> bool:
    """Return True for a divergence of equal distributions, whose sign depends on rounding."""
    return bool(x.abs().max() < 0.02) if x.numel() else False


def _differentiable(x: Tensor) -> bool:
    return x.grad_fn is not None and (x.ndim > 0 or bool(x.isfinite()))


def draw(seed: int) -> Program:
    """Draw the program of a seed. Run each line on the stock model, so that the next line fits the tensors."""
    rng = random.Random(seed)
    setup = _draw_setup(rng)
    run = Run(setup, patched=False)
    steps: list[str] = []
    fresh = iter(range(1, 1000))
    length = rng.randint(2, 10)
    weights = dict(WEIGHTS)
    if rng.random() < SHARE_OF_TWO:
        weights["divergences"] = DIVERGENCES_OF_TWO
        steps.append(f"t0 = {rng.choice(SECOND_LOGITS)}")
        run.step(steps[0])
    for _ in range(4 * length):
        if len(steps) == length:
            break
        group = rng.choices([*weights], [*weights.values()])[0]
        template = rng.choice(BY_GROUP[group])
        if setup.dtype == "bfloat16" and DISCRETE.search(template):
            continue
        drawing = Draw(rng, run.tensors, fresh)
        try:
            step = template.format_map(drawing)
        except Unsuitable:
            continue
        if DISCRETE.search(template) and any(map(_has_ties, drawing.operands())):
            continue
        if rng.random() < 0.05:
            step = f"with torch.no_grad(): {step}"
        elif group == "reads" and rng.random() < 0.1:
            step = f"with torch.inference_mode(): {step}"
        elif setup.dtype == "float32" and rng.random() < 0.3:
            step = f"with autocast(): {step}"
        error = _fails(lambda step=step: run.step(step))  # type: ignore[misc]
        if error is None:
            steps.append(step)
        elif rng.random() < 0.1:
            steps.append(step)
            break
        if group == "divergences" and error is None and _is_rounding(run.tensors[assigned_names(step)[0]]):
            break
        if not all(isinstance(x, Tensor) for x in run.tensors.values()):
            raise TypeError(f"seed {seed}: `{step}` has a result that is not a tensor")
    roots = [
        name
        for name, x in run.tensors.items()
        if rng.random() < (0.9 if name.startswith("loss") else 0.35) and _result(lambda x=x: _differentiable(x)) is True  # type: ignore[misc]
    ]
    return Program(setup, tuple(steps), tuple(roots), rng.random() < 0.5)


def _tensor_names(step: str) -> list[str]:
    """Return the names of the tensors in a line, in order."""
    return list(dict.fromkeys(re.findall(r"\b(?:lg|t\d+|loss\d+)\b", step)))


def assigned_names(step: str) -> list[str]:
    """Return the names that a line assigns or deletes."""
    return [n for n in _tensor_names(step) if re.match(rf"(.*: )?(\w+, )?{n}(, \w+)? = |del {n}", step)]


def _programs_without(program: Program, position: int) -> Iterator[Program]:
    """Yield programs without one line, in which another tensor replaces the result of the line."""
    step = program.steps[position]
    rest = program.steps[:position] + program.steps[position + 1 :]
    new = assigned_names(step)
    used = [n for n in _tensor_names(step) if n not in new] or ["lg"]
    yield replace(program, steps=rest, roots=tuple(r for r in program.roots if r not in new))
    for old in new:
        after = tuple(re.sub(rf"\b{old}\b", used[0], s) for s in program.steps[position + 1 :])
        roots = tuple(dict.fromkeys(used[0] if r == old else r for r in program.roots))
        yield replace(program, steps=program.steps[:position] + after, roots=roots)


def simpler(program: Program) -> Iterator[Program]:
    """Yield smaller programs."""
    yield from (other for other in _changed(program) if _size(other) < _size(program))


def _changed(program: Program) -> Iterator[Program]:
    for position in reversed(range(len(program.steps))):
        yield from _programs_without(program, position)
    for root in program.roots:
        yield replace(program, roots=tuple(r for r in program.roots if r != root))
    for name, value in Setup().__dict__.items():
        if getattr(program.setup, name) != value:
            yield replace(program, setup=replace(program.setup, **{name: value}))
    if program.setup.bias:
        yield replace(program, setup=replace(program.setup, bias=False))
    for position, step in enumerate(program.steps):
        plainer = [re.sub(r"^with .*?: ", "", step)]
        plainer += [re.sub(rf"\b{name}\b(?! =)", "lg", step) for name in _tensor_names(step) if name != "lg"]
        for other in plainer:
            if other != step:
                yield replace(program, steps=(*program.steps[:position], other, *program.steps[position + 1 :]))


def _size(program: Program) -> tuple[int, ...]:
    plain = Setup(bias=False)
    num_options = sum(getattr(program.setup, k) != v for k, v in plain.__dict__.items())
    names = {n for step in program.steps for n in _tensor_names(step)}
    return len(program.steps), len(program.roots), len(names), num_options, sum(map(len, program.steps))
