"""Random arguments of losses and heads, their tensors, and the expected results with their bounds."""

from __future__ import annotations

import contextlib
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from flce.backends import eager
from flce.core.problem import NUMERIC_FIELDS
from flce.testing.oracle import shifted_target
from flce.testing.problem import Problem, make_problem, run_oracle
from tests.helpers import STATS
from tests.hopper import plan_as_on_hopper
from tests.ops.test_softmax import LAYOUTS
from tests.search.bounds import CHAIN, Arithmetic, Gradients, Logits, Loss, RowGradient, loss_of_rows, sum_of_rows
from tests.search.driver import Call, Errors, Mismatch, Refused

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EDGES = (8, 16, 32, 64, 128, 256, 512, 1024, 4096, 32000, 131072)
# Logits of a call on a CPU by backend, and on a GPU: the oracle has many float64 tensors of this size.
MAX_LOGITS = {"torch": 30_000, "triton": 1500, "hopper": 1500, "blocks": 1500, "slabs": 30_000, "gpu_dtypes": 100_000}
GPU_DTYPES = ("hopper", "gpu_dtypes")  # backends of a CPU
OF_PYTORCH = ("torch", "slabs", "gpu_dtypes")  # not interpreted Triton
MAX_LOGITS_ON_GPU = (1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24)

# For each argument its default, and the values that calls have; a value that occurs twice is frequent.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "class_weight": (False, True, 1e-3, "0"),  # a number: times random weights
    "token_weight": (False, True),
    "label_smoothing": (0.0, 0.1, 0.9, 1.0),
    "softcap": (None, 0.5, 3.0, 30.0),
    "logit_scale": (1.0, -0.7, -0.7, 0.1, 0.1, 2.5, 2.5, 0.0),
    "temperature": (1.0, 0.3, 3.0),
    "z_loss": (0.0, 1e-4, 0.5),
    "empty_loss": ("nan", "zero"),
}
LOSS: dict[str, tuple[Any, ...]] = {
    "dtype": tuple(DTYPES),
    "backend": ("torch", "triton", "hopper", "blocks", "slabs", "gpu_dtypes"),
    "vocab": (11,),
    "ignored": ("none", "none", "some", "most", "first", "last", "all"),
    "ignore_index": (-100,),
    "target_dtype": ("int64", "int64", "int32"),
    "target_layout": ("contiguous", *LAYOUTS),
    "std": (2.0, 0.0, 0.1, 4.0, 30.0),
    "seed": (0,),
    "reduction": ("mean", "sum", "none"),
    **OPTIONS,
    "num_items": (None,),
    "shift": (0, 0, 0, 1, 2),
    "stats": ((),),
    "upstream": (1.0, 1.0, 1.0, 1.75, -0.5, 0.0, 1e-8, 2.0**16),
}
# Few tiles of the smallest plans have fewer classes.
LEAST_TILE_CLASSES = 16
HEAD: dict[str, tuple[Any, ...]] = {
    "leading": ((5,),),
    "hidden": (6,),
    "bias": (False, False, False, False, True),
    "adapter_ranks": ((), (), (), (), (8,), (1, 5)),
    "layout": ("contiguous", "contiguous", *LAYOUTS),
    "rows_times": (1.0, 1.0, 1.0, 0.0, 30.0),  # a factor of every fifth row
    "offset": (0.0, 0.0, 0.0, 50.0),  # of all logits
    "large_columns": (False, False, False, False, False, True),  # of x and w, which change no logit
    "grads": ("xwbaBt", "xwbaBt", "xwbaB", "xaB", "x", "w", "t", ""),
    "chunk_rows": (None,),
    "beyond": (None,),  # bytes of the budget above the least budget
    "strategy": ("auto", "auto", "tokens", "vocab"),
    "skip_ignored": ("auto", True, False),
    "in_ignored": ("", "", "nan", "inf"),  # in the hidden states of ignored tokens, if they are dropped
    "logits_dtype": (None,),
    "accum_dtype": (None,),
    "sample_below": (None,),
}
# Arguments that decide which kernels are compiled. On a GPU many calls have the same.
COMPILED = {"dtype", "backend", "reduction", "bias", "adapter_ranks", "layout", "grads", "strategy", "skip_ignored"}


def defaults(**tables: tuple[Any, ...]) -> dict[str, Any]:
    return {name: values[0] for name, values in tables.items()}


def size(rng: random.Random, most: int) -> int:
    """Return a size from 1 to `most`: small, log-uniform, or around a power of two."""
    how = rng.random()
    if how < 0.3:
        return rng.randint(1, min(most, 12))
    if how < 0.65:
        return min(most, round(2 ** rng.uniform(0, max(most, 1).bit_length())))
    edges = [edge for edge in EDGES if edge <= most + 1] or [1]
    return max(1, min(most, rng.choice(edges) + rng.choice([-1, 0, 1])))


def smaller(rng: random.Random, compiled: random.Random, size: int, share: float = 1.0) -> int:
    """Return a size for the kernels of `size`, which is less by at most this share: 16 divides both or none."""
    return size if rng is compiled else size - 16 * rng.randrange(max(1, -int(-size * share // 16)))


def draw_loss(rng: random.Random, compiled: random.Random, device: str) -> tuple[Call, int]:
    """Draw the arguments of all losses, and the largest number of logits. `compiled`: see `Kind.draw`."""
    call = {name: (compiled if name in COMPILED else rng).choice(values) for name, values in LOSS.items()}
    rare = compiled.choice([0.15, 0.5]) if device == "cpu" else 0.25
    call["dtype"] = compiled.choices(LOSS["dtype"], [25, 30, 25, 20] if device == "cpu" else [5, 20, 45, 30])[0]
    for name, (default, *others) in OPTIONS.items():
        call[name] = rng.choice(others) if compiled.random() < rare else default
    call["stats"] = tuple(name for name in STATS if compiled.random() < 0.15)
    shares = [40, 12, 10, 8, 10, 20] if device == "cpu" else [10, 90, 0, 0, 0, 0]
    (call["backend"],) = compiled.choices(LOSS["backend"], shares)
    most = MAX_LOGITS[call["backend"]]
    if device == "cuda":
        (most,) = compiled.choices(MAX_LOGITS_ON_GPU, [20, 30, 30, 18, 2])
    vocab = smaller(rng, compiled, size(compiled, most // 4), 1 / 8)
    call["ignore_index"] = rng.choice([-100, -100, 0, vocab - 1, vocab + 5, -1, 2**32 + 3])
    call["target_dtype"] = "int64" if call["ignore_index"] > 2**31 else call["target_dtype"]
    call["empty_loss"] = "zero" if call["class_weight"] == "0" else call["empty_loss"]
    counts = [None, 1, 13, *[0] * (call["empty_loss"] == "zero")]
    call["num_items"] = rng.choice(counts) if call["reduction"] == "sum" else None
    return {**call, "vocab": vocab, "seed": rng.randrange(1 << 20)}, most


def draw_head(rng: random.Random, compiled: random.Random, device: str) -> Call:
    """Draw the arguments of all functions with a head."""
    of_loss, most = draw_loss(rng, compiled, device)
    call = {name: (compiled if name in COMPILED else rng).choice(values) for name, values in HEAD.items()} | of_loss
    on_cpu, half, vocab = device == "cpu", call["dtype"] in ("bfloat16", "float16"), call["vocab"]
    max_tokens = 300 if on_cpu and call["backend"] != "gpu_dtypes" else 8192
    tokens = smaller(rng, compiled, size(compiled, max(1, min(most // vocab, max_tokens))))
    leading: tuple[int, ...] = rng.choice([(tokens,), (tokens,), (rng.randint(1, 3), -(-tokens // 3))])
    if rng.random() < 0.03:
        leading = rng.choice([(), (0,), (0, 3), (2, 0)])
    hiddens = [1, 2, 3, 7, 8, 16, 24, 33, 64, 129] if on_cpu else [8, 64, 128, 129, 256, 511, 512, 1023, 1024]
    hiddens = hiddens[: 7 if call["backend"] in ("triton", "hopper", "blocks") and on_cpu else None]
    how = compiled.choice(["default", "default", "rows", "least", "roomy"])
    if how == "least" and vocab > 1 << 15:  # Some plans then have a block for each class.
        how = "roomy"
    every = compiled.random() < 0.5
    some = "".join(letter for letter in "xwbaBt" if compiled.random() < 0.5)
    return {
        **call,
        "leading": leading,
        "shift": min(call["shift"], *leading[-1:]) if leading else 0,
        "grads": call["grads"] if every else some,
        "hidden": compiled.choice(hiddens if on_cpu else [h for h in hiddens if h * vocab <= 4 * most]),
        "chunk_rows": size(rng, 64 if on_cpu else 4096) if how == "rows" and call["strategy"] != "vocab" else None,
        "beyond": {"least": 0, "roomy": rng.randrange(5000 if on_cpu else 1 << 26)}.get(how),
        "logits_dtype": call["dtype"] if compiled.random() < 0.1 and half else None,
        "accum_dtype": "bfloat16" if compiled.random() < 0.05 and call["dtype"] == "bfloat16" else None,
        "sample_below": 2.0**-20 if compiled.random() < 0.1 else None,
    }


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Set the backend of all calls. hopper: interpreted Triton with the plans and dtypes of a Hopper GPU; blocks:
    interpreted Triton, with few classes at a time; slabs: PyTorch, with few rows at a time; gpu_dtypes: PyTorch, with
    the dtypes of a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLCE_BACKEND", "torch" if name in OF_PYTORCH else "triton")
        if name == "blocks":
            from flce.backends import triton

            launch_size = triton._launch_size  # A lane has at most one column of the edges of a row.
            patch.setattr(
                triton,
                "_launch_size",
                lambda *args: (launch := launch_size(*args)) | {"PARTS": 1, "LANES": 2 * launch["VECTOR"]},
            )
        if name == "slabs":
            patch.setattr(eager, "CPU_SLAB_BYTES", 1024)
        plans = plan_as_on_hopper(patch, name == "hopper") if name in GPU_DTYPES else iter(())
        try:
            next(plans, None)
        except pytest.skip.Exception as reason:
            raise Refused(str(reason)) from None
        try:
            yield
        finally:
            next(plans, None)


def least_budget(with_one_byte: Callable[[], Any]) -> int:
    """Return the least budget, which the error of a call with a budget of one byte names."""
    try:
        with_one_byte()
    except ValueError as error:
        found = re.search(r"the least is (\d+) bytes", str(error))
        if found is None:
            raise
        return int(found[1])
    return 1


def run_within_budget(call: Call, p: Problem, forward: Callable[[int | None], Any]) -> Any:
    """Return the result of ``forward(max_workspace_bytes)`` with the budget of a call."""
    if call["beyond"] is None or not p.target.numel():
        return forward(None)
    return forward(call["beyond"] + least_budget(lambda: forward(1)))


LOSS_ARGUMENTS = ("reduction", *NUMERIC_FIELDS, "shift", "empty_loss")
MAKE_PROBLEM = (*LOSS_ARGUMENTS, "ignore_index", "class_weight", "token_weight", "vocab", "std")


def problem_of(call: Call, device: str, **head: Any) -> Problem:
    """Return the tensors of a call."""
    kwargs = {name: call[name] for name in MAKE_PROBLEM}
    if call["num_items"] is not None:
        kwargs["num_items"] = call["num_items"]
    g = torch.Generator(device).manual_seed(call["seed"])
    kwargs["class_weight"] = bool(call["class_weight"])
    kwargs |= {"dtype": DTYPES[call["dtype"]], "target_dtype": getattr(torch, call["target_dtype"]), "generator": g}
    p = make_problem(call["leading"], **{"hidden": None, **head}, **kwargs, device=device)
    if call["class_weight"]:
        p.kwargs["weight"] *= float(call["class_weight"])
    share = torch.rand(p.target.shape, device=device, generator=g)
    position = torch.arange(p.target.numel(), device=device).view(p.target.shape)
    half = p.target.numel() // 2
    masks = {"none": share < 0, "some": share < 0.3, "most": share < 0.9, "all": share >= 0}
    masks |= {"first": position < half, "last": position >= half}
    target = p.target.masked_fill(masks[call["ignored"]], call["ignore_index"])
    return replace(p, target=LAYOUTS[call["target_layout"]](target) if target.dim() else target)


def head_of(call: Call, device: str) -> Problem:
    """Return the tensors of a call with a head. Some rows are scaled, all logits may share an offset."""
    p = problem_of(call, device, **{name: call[name] for name in ("hidden", "bias", "adapter_ranks")})
    x, w = p.input.clone(), p.linear_weight.clone()
    x.view(-1, x.shape[-1])[2::5] *= call["rows_times"]
    if call["offset"]:
        x[..., 0], w[:, 0] = 1.0, call["offset"]
    if call["large_columns"] and call["layout"] not in ("windows", "one column"):
        x[..., -1], w[:, -1] = 0.0, 2.0**13 * w[:, -1].sign()
        x[..., -2:-1], w[:, -2:-1] = 2.0**13, 0.0
    change = LAYOUTS[call["layout"]]
    p = replace(p, input=x, linear_weight=w).map(lambda t, letter: change(t) if t.dim() else t)
    weight = p.kwargs.get("weight")
    return p if weight is None else p.with_(weight=change(weight))


def spoil(call: Call, x: Tensor, target: Tensor) -> Tensor:
    """Return hidden states of which those of ignored tokens, if they are dropped, are no numbers."""
    if not call["in_ignored"] or call["skip_ignored"] is not True:
        return x
    _, valid = shifted_target(target.long(), call["ignore_index"], call["shift"])
    return x.masked_fill(~valid[..., None], float(call["in_ignored"]))


def leaves_of_call(call: Call, p: Problem) -> Problem:
    """Return the tensors of a call, with leaves for those that get a gradient."""

    def leaf(t: Tensor, letter: str) -> Tensor:
        t = spoil(call, t, p.target) if letter in "xa" else t
        return t.detach().requires_grad_(letter in call["grads"])

    return p.map(leaf)


def by_letter(x: Any, w: Any, b: Any = None, t: Any = None, adapters: Sequence[tuple[Any, Any]] = ()) -> dict[str, Any]:
    """Return tensors by letter: x, w, b, t, and a0, B0, ... of adapters."""
    pairs = {f"{'aB'[j]}{k}": t for k, pair in enumerate(adapters) for j, t in enumerate(pair)}
    return {"x": x, "w": w, "b": b, "t": t, **pairs}


def named(p: Problem) -> dict[str, Tensor]:
    tensors = by_letter(p.input, p.linear_weight, p.linear_bias, p.token_weight, p.adapters)
    return {name: t for name, t in tensors.items() if t is not None}


def leaves_of(p: Problem) -> dict[str, Tensor]:
    """Return the tensors of a problem that require a gradient."""
    return {name: t for name, t in named(p).items() if t.requires_grad}


def upstream_of(call: Call, p: Problem) -> Tensor:
    """Return the upstream gradient, in the dtype of the loss."""
    dtype = torch.float64 if p.input.dtype == torch.float64 else torch.float32
    if call["reduction"] != "none":
        return torch.tensor(call["upstream"], dtype=dtype, device=p.input.device)
    count = p.target.numel()
    each = torch.linspace(0.3, 1.3, count, dtype=dtype, device=p.input.device).view(p.target.shape)
    return each * call["upstream"]


def subnormal(call: Call, dtype: torch.dtype) -> float:
    """Return the rounding error of subnormal gradients in memory, in units of the largest factor of a gradient. 0
    except for float16: those of other dtypes are too small to count."""
    return 2.0**-25 * max(1.0, 1 / 64 + 32.0 * call.get("z_loss", 0.0)) if dtype == torch.float16 else 0.0


def arithmetic(call: Call, p: Problem, **more: Any) -> Arithmetic:
    """Return the dtypes in which a call rounds."""
    result, rows = p.input.dtype, torch.float64 if p.input.dtype == torch.float64 else torch.float32
    on_gpu = p.has_head and (p.input.device.type == "cuda" or call["backend"] in GPU_DTYPES)
    equal_rows = bool(call.get("offset")) and call["hidden"] == 1
    std = call["std"] * abs(call["logit_scale"]) * max(1.0, call.get("rows_times", 1.0))
    saturated = 4.0 * (call["softcap"] or math.inf) <= std
    has_least_tiles = call.get("beyond") is not None
    least_tile = 1 if call["backend"] in OF_PYTORCH else LEAST_TILE_CLASSES
    return Arithmetic(
        result=result,
        rows=rows,
        logits=DTYPES[call["logits_dtype"]] if on_gpu and call.get("logits_dtype") else rows,
        gradients=result if on_gpu else rows,
        sums=DTYPES[call["accum_dtype"]] if call.get("accum_dtype") and p.input.device.type == "cuda" else rows,
        upstream=max(1.0, abs(call["upstream"])),
        tiles=-(-call["vocab"] // least_tile) if has_least_tiles else 1,
        one_hot=std > 15.0,
        subnormal=subnormal(call, result) * on_gpu,
        tensor_cores=p.has_head and p.input.device.type == "cuda" and result.itemsize == 2,
        coherent=call["std"] == 0.0
        or saturated
        or equal_rows
        or (std > 15.0 and bool(call.get("large_columns")))
        or call.get("layout") in ("expanded", "one column"),
        roundings=1 + (call["reduction"] != "none" and call["upstream"] != 1.0),
        **more,
    )


class Rows:
    """The valid rows of a problem, and the logits of these rows with their errors."""

    def __init__(self, p: Problem, how: Arithmetic, ignore_index: int, shift: int, **transform: Any) -> None:
        self.p, self.how = p, how
        target, self.valid = shifted_target(p.target.long(), ignore_index, shift)
        self.index = self.valid.reshape(-1).nonzero().flatten()
        self.target = self.of(target)
        self.bias = None if p.linear_bias is None else p.linear_bias.double()
        pairs = ((p.input, p.linear_weight), *p.adapters) if p.has_head else ()
        self.terms = [(self.of(x.double(), 1), w.double()) for x, w in pairs]
        given = None if p.has_head else self.of(p.input.double(), 1)
        self.logits = Logits(self.terms, self.bias, how, given=given, **transform)

    def of(self, x: Tensor, trailing: int = 0) -> Tensor:
        """Return the valid rows of a tensor with a value, or `trailing` dimensions of values, for each position."""
        return x.reshape(self.p.target.numel(), *x.shape[x.dim() - trailing :])[self.index]

    def of_indices(self, x: Tensor | None, ignored: int = -1, trailing: int = 0) -> Tensor | None:
        """Return the valid rows of indices or masks, which must be `ignored` at other positions."""
        if x is None:
            return None
        found = self.of(x, trailing)
        if not torch.equal(self.to_positions(found.long() - ignored) + ignored, x.long()):
            raise Mismatch("ignored positions", f"{x}, expected {ignored}")
        return found

    def to_positions(self, values: Tensor) -> Tensor:
        """Return values of rows at the positions of the rows, and 0 at others."""
        full = values.new_zeros(self.p.target.numel(), *values.shape[1:])
        return full.index_copy_(0, self.index, values).view((*self.p.target.shape, *values.shape[1:]))

    def compare(self, errors: Errors, what: str, got: Tensor | None, expected: Tensor, bound: Tensor) -> None:
        """Compare a result of each position. `expected`, `bound`: of the rows; other positions must be 0."""
        got = None if got is None else got.detach()
        errors.compare(what, got, self.to_positions(expected.detach()), self.to_positions(bound))

    def compare_gradients(
        self,
        errors: Errors,
        prefix: str,
        gradients: Gradients,
        grads: Mapping[str, Tensor | None],
        exact: Mapping[str, Tensor],
        shares: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({}),
    ) -> None:
        """Compare gradients by letter; None: not requested. `shares`: functions that return a process's share."""
        for name, grad in grads.items():
            if grad is None:
                continue
            number = int(name[1:] or -1) + 1
            if name[0] in "xa":
                bound = gradients.times_weight(self.terms[number][1]) if self.terms else gradients.element()
                bound = self.to_positions(bound)
            elif name == "b":
                bound = gradients.transposed_times(self.logits.z.new_ones(len(self.index), 1))[:, 0]
            else:
                bound = gradients.transposed_times(self.terms[number][0])
            share = shares.get(name, lambda t: t)
            largest = torch.finfo(self.p.input.dtype).max
            errors.compare(f"{prefix} gradient {name[0]}", grad, share(exact[name]), share(bound), largest)


class Expected:
    """The oracle's results of a loss, and the bounds of their errors."""

    def __init__(self, p: Problem, upstream: Tensor, how: Arithmetic) -> None:
        self.p, self.how, u = p, how, how.u
        self.oracle = run_oracle(p, grad_output=upstream)
        kwargs = p.kwargs
        transform = {name: kwargs[name] for name in ("softcap", "logit_scale", "temperature", "ignore_index", "shift")}
        self.rows = Rows(p, how, **transform)
        logits, y = self.rows.logits, self.rows.target
        weight = None if kwargs.get("weight") is None else kwargs["weight"].double()
        loss: Loss = loss_of_rows(logits, y, how, weight, kwargs["label_smoothing"], kwargs["z_loss"])

        divisor = z_divisor = logits.z.new_ones(())
        if kwargs["reduction"] == "mean":
            of_targets = torch.ones_like(logits.lse) if weight is None else weight[y]
            divisor, z_divisor = of_targets.sum(), torch.full_like(divisor, max(1, len(y)))
        elif kwargs.get("num_items") is not None:
            divisor = z_divisor = torch.full_like(divisor, kwargs["num_items"])
        # A divisor of 0 is an error of the search, unless the loss is then 0.
        scale, z_scale = (d.reciprocal().masked_fill(d == 0.0, 0.0) for d in (divisor, z_divisor))
        of_token = torch.ones_like(logits.lse)
        if p.token_weight is not None:
            of_token = self.rows.of(p.token_weight.double())
        self.losses = scale * loss.cross_entropy + z_scale * loss.z_loss
        self.drift, z_drift = scale * loss.drift, z_scale * loss.z_drift
        self.dlosses = scale * loss.dcross_entropy + z_scale * loss.dz_loss + 4.0 * u * self.losses.abs()
        self.drift = self.drift + z_drift
        self.dlosses = self.dlosses + self.drift.abs()
        self.of_token, self.z_losses = of_token, z_scale * of_token * loss.z_loss
        self.dz_losses = z_scale * of_token.abs() * (loss.dz_loss + 4.0 * u * loss.z_loss)
        self.z_drift = of_token * z_drift
        # Gradients.
        self.upstream = self.rows.of(upstream.double().expand(p.target.shape))
        row = self.upstream * of_token
        softmax, direct = (scale * row[:, None] * part for part in (loss.gradient.softmax, loss.gradient.direct))
        of_lse = (row * z_scale * 2.0 * kwargs["z_loss"])[:, None]
        gradient = RowGradient(
            softmax + of_lse * logits.lse[:, None],
            direct,
            of_lse=of_lse if kwargs["z_loss"] else None,
            roundings=CHAIN + self.num_factors(),
            smoothed=kwargs["label_smoothing"] > 0.0,
        )
        self.gradients = Gradients(logits, gradient, how)

    def num_factors(self) -> int:
        """Return the number of factors of a row's gradient that are not 1."""
        kwargs = self.p.kwargs
        names = ("softcap", "label_smoothing", "logit_scale", "temperature")
        given = [kwargs[name] not in (None, 0.0, 1.0) for name in names]
        given += [t is not None for t in (kwargs.get("weight"), self.p.token_weight)]
        return sum(given) + (kwargs["reduction"] == "mean")

    def compare_losses(self, errors: Errors, prefix: str, loss: Tensor, output: Any, stats: Sequence[str]) -> None:
        """Compare the loss, and the statistics of a call with statistics."""
        p, rows, oracle, how = self.p, self.rows, self.oracle, self.how
        logits, to_positions = rows.logits, rows.to_positions

        def reduced(values: Tensor, of_values: Tensor) -> Tensor:
            return to_positions(of_values) if p.kwargs["reduction"] == "none" else sum_of_rows(values, of_values, how)

        bound = reduced(self.losses * self.of_token, self.dlosses * self.of_token.abs())
        if p.kwargs["reduction"] != "none":
            bound = bound + (self.drift * self.of_token).sum().abs()
        errors.compare(f"{prefix} loss", loss, oracle.loss, bound)
        if not stats:
            return
        if p.kwargs["z_loss"]:
            bound = reduced(self.z_losses, self.dz_losses)
            if p.kwargs["reduction"] != "none":
                bound = bound + self.z_drift.sum().abs()
            errors.compare(f"{prefix} z_loss", output.z_loss, oracle.z_loss, bound)
        bounds = logits.results(rows.target)
        for name in bounds.keys() & set(stats):
            errors.compare(f"{prefix} {name}", getattr(output, name), getattr(oracle, name), to_positions(bounds[name]))
        compare_argmax(logits, rows.target, rows.of_indices(output.argmax), rows.of_indices(output.correct, 0))

    def compare_gradients(self, errors: Errors, prefix: str, grads: Mapping[str, Tensor | None], **shares: Any) -> None:
        """Compare gradients by letter; None: not requested."""
        oracle = self.oracle
        exact = by_letter(oracle.grad_input, oracle.grad_weight, oracle.grad_bias, adapters=oracle.grad_adapters)
        of_tokens = grads.get("t")
        if of_tokens is not None:
            bound = self.upstream.abs() * self.dlosses + self.how.rounded(self.upstream * self.losses)
            exact_of_tokens = self.rows.of(oracle.grad_token_weight)  # type: ignore[arg-type]
            exact_of_tokens, bound = (self.rows.to_positions(t) for t in (exact_of_tokens, bound))
            largest = torch.finfo(of_tokens.dtype).max
            errors.compare(f"{prefix} gradient t", of_tokens, exact_of_tokens, bound, largest)
        rest = {name: grad for name, grad in grads.items() if name != "t"}
        self.rows.compare_gradients(errors, prefix, self.gradients, rest, exact, **shares)


def compare_argmax(logits: Logits, target: Tensor, argmax: Tensor | None, correct: Tensor | None) -> None:
    """Compare results of the rows with targets (N,). Logits that differ by less than their errors may change places."""
    largest = torch.arange(logits.z.shape[1], device=target.device) == logits.z.argmax(-1, keepdim=True)
    possible = largest | ((logits.dz > 0) & (logits.z + logits.dz >= (logits.z - logits.dz).amax(-1, keepdim=True)))
    if argmax is not None and not possible.gather(1, argmax[:, None]).all():
        raise Mismatch("argmax", f"{argmax}, expected {largest.nonzero()[:, 1]}")
    if correct is not None:
        of_target = possible.gather(1, target[:, None])[:, 0]
        expected = correct & of_target | ~correct & ~(of_target & (possible.sum(-1) == 1))
        if not expected.all() or (argmax is not None and not torch.equal(correct, argmax == target)):
            raise Mismatch("correct", f"{correct}, targets {target}, largest {largest.nonzero()[:, 1]}")
