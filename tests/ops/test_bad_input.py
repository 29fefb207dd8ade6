"""Every documented error: its type, and a message that says what was given and what was expected."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flce

N, H, V = 6, 8, 20
f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16


def good(**changes: Any) -> dict[str, Any]:
    """The arguments of a call without a mistake, with ``changes``."""
    g = torch.Generator().manual_seed(0)
    arguments: dict[str, Any] = {
        "input": torch.randn(N, H, generator=g),
        "linear_weight": torch.randn(V, H, generator=g),
        "target": torch.randint(0, V, (N,), generator=g),
    }
    arguments.update(changes)
    return arguments


def words(*parts: Any) -> str:
    """A regular expression: all of the parts, in any order."""
    return "(?s)" + "".join(f"(?=.*{part})" for part in parts)


def probabilities() -> Tensor:
    return torch.full((N, V), 1 / V)


def adapter() -> tuple[Tensor, Tensor]:
    return torch.ones(N, 2), torch.ones(V, 2)


def nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, H), torch.ones(3, H)], layout=layout)


class Packed(Tensor):
    """A tensor whose values are not its elements, as torchao's quantised ones."""

    def dequantize(self) -> Tensor:
        return self.as_subclass(Tensor) * 2


Row = tuple[str, Callable[[], dict[str, Any]], type[Exception], str]

ROWS: list[Row] = [
    # ---- not a tensor
    ("input is a list", lambda: good(input=[[0.0] * H] * N), TypeError, words("input", "Tensor", "list")),
    ("weight is an array", lambda: good(linear_weight=0.5), TypeError, words("linear_weight", "float")),
    ("target is a list", lambda: good(target=[0] * N), TypeError, words("target", "list")),
    ("target is None", lambda: good(target=None), TypeError, words("target", "NoneType")),
    ("bias is a list", lambda: good(linear_bias=[0.0] * V), TypeError, words("linear_bias", "list")),
    ("class weight is a list", lambda: good(weight=[1.0] * V), TypeError, words("weight", "list")),
    ("token weight is a list", lambda: good(token_weight=[1.0] * N), TypeError, words("token_weight", "list")),
    # ---- dtypes
    ("integer input", lambda: good(input=torch.ones(N, H).long()), TypeError, words("input", "int64")),
    ("bool input", lambda: good(input=torch.ones(N, H).bool()), TypeError, words("input", "bool")),
    ("complex input", lambda: good(input=torch.ones(N, H) * 1j), TypeError, words("input", "complex64")),
    ("integer head", lambda: good(linear_weight=torch.ones(V, H).int()), TypeError, words("linear_weight", "int32")),
    ("integer bias", lambda: good(linear_bias=torch.ones(V).long()), TypeError, words("linear_bias", "int64")),
    (
        "mixed dtypes of input and head",
        lambda: good(linear_weight=torch.ones(V, H, dtype=bf16)),
        TypeError,
        words("float32", "bfloat16", "linear_weight"),
    ),
    (
        "mixed dtypes of input and bias",
        lambda: good(linear_bias=torch.ones(V, dtype=f64)),
        TypeError,
        words("float32", "float64", "linear_bias"),
    ),
    (
        "float8 input and head",
        lambda: good(
            input=torch.ones(N, H).to(torch.float8_e4m3fn), linear_weight=torch.ones(V, H).to(torch.float8_e4m3fn)
        ),
        TypeError,
        words("float8"),
    ),
    ("target int16", lambda: good(target=torch.zeros(N, dtype=torch.int16)), TypeError, words("int16", "int64")),
    ("target uint8", lambda: good(target=torch.zeros(N, dtype=torch.uint8)), TypeError, words("uint8", "int64")),
    ("target bool", lambda: good(target=torch.zeros(N).bool()), TypeError, words("bool", "int64")),
    ("target complex", lambda: good(target=torch.zeros(N) * 1j), TypeError, words("complex64")),
    ("class weight integer", lambda: good(weight=torch.ones(V).long()), TypeError, words("weight", "int64")),
    ("token weight bool", lambda: good(token_weight=torch.ones(N).bool()), TypeError, words("token_weight", "bool")),
    # ---- layouts and quantised heads
    *(
        (
            f"{t.layout} input",
            lambda t=t: good(input=t),
            TypeError,
            words("input", "dense", t.layout, r"\.to_dense\(\)"),
        )
        for t in (torch.ones(N, H).to_sparse(), torch.ones(N, H).to_sparse_csr(), torch.ones(N, H).to_mkldnn())
    ),
    ("sparse target", lambda: good(target=torch.ones(N).long().to_sparse()), TypeError, words("target", "sparse_coo")),
    *(
        (
            f"{layout} nested input",
            lambda layout=layout: good(input=nested(layout)),
            TypeError,
            words("nested", r"torch\.cat\(input\.unbind"),
        )
        for layout in (torch.strided, torch.jagged)
    ),
    (
        "int8 head",
        lambda: good(linear_weight=torch.ones(V, H).to(torch.int8)),
        TypeError,
        words("int8", "quantised head"),
    ),
    (
        "float8 head",
        lambda: good(linear_weight=torch.ones(V, H).to(torch.float8_e4m3fn)),
        TypeError,
        words("float8", "quantised head"),
    ),
    (
        "a head of packed numbers",
        lambda: good(linear_weight=Packed(torch.ones(V, H))),
        TypeError,
        words("Packed of torch.float32", "quantised head"),
    ),
    # ---- the order of the arguments
    (
        "target first",
        lambda: good(input=torch.zeros(N).long(), target=torch.ones(N, H)),
        TypeError,
        words("input", "int64", "hidden states come first"),
    ),
    (
        "target before the head",
        lambda: good(linear_weight=torch.zeros(N).int(), target=torch.ones(V, H)),
        TypeError,
        words("linear_weight", "int32", "hidden states come first"),
    ),
    # ---- scalars of the wrong type
    ("softcap a string", lambda: good(softcap="30"), TypeError, words("softcap")),
    ("softcap a tensor of two", lambda: good(softcap=torch.ones(2)), TypeError, words("softcap")),
    ("logit_scale a string", lambda: good(logit_scale="1"), TypeError, words("logit_scale")),
    ("logit_scale None", lambda: good(logit_scale=None), TypeError, words("logit_scale")),
    ("temperature a string", lambda: good(temperature="1"), TypeError, words("temperature")),
    ("temperature None", lambda: good(temperature=None), TypeError, words("temperature")),
    ("z_loss a string", lambda: good(z_loss="0"), TypeError, words("z_loss")),
    ("z_loss None", lambda: good(z_loss=None), TypeError, words("z_loss")),
    ("z_loss complex", lambda: good(z_loss=1j), TypeError, words("z_loss")),
    ("label_smoothing a string", lambda: good(label_smoothing="0"), TypeError, words("label_smoothing")),
    ("label_smoothing None", lambda: good(label_smoothing=None), TypeError, words("label_smoothing")),
    ("ignore_index a bool", lambda: good(ignore_index=True), TypeError, words("ignore_index", "int", "bool")),
    (
        "ignore_index a bool tensor",
        lambda: good(ignore_index=torch.tensor(True)),
        TypeError,
        words("ignore_index", "torch.bool"),
    ),
    (
        "ignore_index a tensor of two",
        lambda: good(ignore_index=torch.ones(2).long()),
        TypeError,
        words("ignore_index", "int64", r"\(2,\)"),
    ),
    (
        "ignore_index a fraction in a tensor",
        lambda: good(ignore_index=torch.tensor(1.0)),
        TypeError,
        words("ignore_index", "int", "float32"),
    ),
    ("softcap a bool", lambda: good(softcap=True), TypeError, words("softcap", "number", "bool")),
    ("z_loss complex in a tensor", lambda: good(z_loss=torch.tensor(1j)), TypeError, words("z_loss", "complex64")),
    (
        "a temperature that is trained",
        lambda: good(temperature=torch.tensor(1.0, requires_grad=True)),
        TypeError,
        words("temperature", "number", "requires grad"),
    ),
    ("ignore_index a string", lambda: good(ignore_index="-100"), TypeError, words("ignore_index")),
    ("ignore_index a fraction", lambda: good(ignore_index=1.5), TypeError, words("ignore_index")),
    ("shift a fraction", lambda: good(shift=1.5), TypeError, words("shift")),
    (
        "shift a fraction in a tensor",
        lambda: good(shift=torch.tensor(1.5)),
        TypeError,
        words("shift", "int", "float32"),
    ),
    ("num_items a list", lambda: good(num_items=[3], reduction="sum"), TypeError, words("num_items", "list")),
    *(
        (f"num_items {t}", lambda t=t: good(num_items=t, reduction="sum"), TypeError, words("num_items", t.dtype))
        for t in (torch.tensor(3 + 0j), torch.tensor(True))
    ),
    ("shift a string", lambda: good(shift="1"), TypeError, words("shift")),
    ("num_items a string", lambda: good(num_items="3", reduction="sum"), TypeError, words("num_items")),
    ("options a dict", lambda: good(options={"chunk_rows": 4}), TypeError, words("options", "ChunkOptions", "dict")),
    # ---- shapes
    ("input 0-d", lambda: good(input=torch.tensor(1.0)), ValueError, words("input")),
    ("head 1-d", lambda: good(linear_weight=torch.ones(H)), ValueError, words("linear_weight", rf"\({H},\)")),
    ("head 0-d", lambda: good(linear_weight=torch.tensor(1.0)), ValueError, words("linear_weight")),
    ("H differs", lambda: good(linear_weight=torch.ones(V, H + 1)), ValueError, words(H, H + 1)),
    (
        "head transposed",
        lambda: good(linear_weight=torch.ones(H, V)),
        ValueError,
        words(r"must have shape \(V, H\)", rf"got \({H}, {V}\)", r"give linear_weight\.t\(\)"),
    ),
    (
        "head first, as Liger has it",
        lambda: good(input=torch.ones(V, H), linear_weight=torch.ones(N, H)),
        ValueError,
        words("target", "hidden states come first"),
    ),
    (
        "head first, in three dimensions and with a shift",
        lambda: good(
            input=torch.ones(V, H), linear_weight=torch.ones(2, 3, H), target=torch.zeros(2, 3).long(), shift=1
        ),
        ValueError,
        words("target", "hidden states come first"),
    ),
    (
        "floating indices",
        lambda: good(target=torch.zeros(N)),
        ValueError,
        words("class probabilities", r"for indices call \.long\(\)"),
    ),
    ("N differs", lambda: good(target=torch.zeros(N + 1).long()), ValueError, words("target", N, N + 1)),
    ("target too many dims", lambda: good(target=torch.zeros(N, 1).long()), ValueError, words("target", N)),
    ("target 0-d for a batch", lambda: good(target=torch.tensor(0)), ValueError, words("target", N)),
    (
        "leading dims transposed",
        lambda: good(input=torch.ones(2, 3, H), target=torch.zeros(3, 2).long()),
        ValueError,
        words("target", r"\(2, 3\)", r"\(3, 2\)"),
    ),
    ("target flattened", lambda: good(input=torch.ones(2, 3, H)), ValueError, words("target", r"\(2, 3\)")),
    ("bias too short", lambda: good(linear_bias=torch.ones(V - 1)), ValueError, words("linear_bias", V, V - 1)),
    ("bias of one", lambda: good(linear_bias=torch.ones(1)), ValueError, words("linear_bias", V)),
    ("bias 2-d", lambda: good(linear_bias=torch.ones(1, V)), ValueError, words("linear_bias")),
    ("class weight too long", lambda: good(weight=torch.ones(V + 1)), ValueError, words("weight", V, V + 1)),
    ("class weight per token", lambda: good(weight=torch.ones(N)), ValueError, words("weight", V, N)),
    ("token weight shape", lambda: good(token_weight=torch.ones(V)), ValueError, words("token_weight", V, N)),
    (
        "V = 0",
        lambda: good(linear_weight=torch.ones(0, H), target=torch.full((N,), -100)),
        ValueError,
        words("V|linear_weight|class", 0),
    ),
    (
        "H = 0",
        lambda: good(input=torch.ones(N, 0), linear_weight=torch.ones(V, 0)),
        ValueError,
        words("H|hidden|input|linear_weight", 0),
    ),
    ("probabilities of the wrong V", lambda: good(target=torch.ones(N, V + 1)), ValueError, words("target", V)),
    ("probabilities with a shift", lambda: good(target=probabilities(), shift=1), ValueError, words("shift")),
    (
        "logprob of probabilities",
        lambda: good(target=probabilities(), stats=("logprob",)),
        ValueError,
        words("logprob"),
    ),
    (
        "correct of probabilities",
        lambda: good(target=probabilities(), stats=("correct",)),
        ValueError,
        words("correct"),
    ),
    # ---- adapters
    (
        "adapter of lists",
        lambda: good(adapters=[(adapter()[0], [[0.0] * 2] * V)]),
        TypeError,
        words(r"adapters\[0\]\[1\]", "Tensor", "list"),
    ),
    ("adapters a tensor", lambda: good(adapters=torch.ones(N, 2)), TypeError, words("adapters", "Tensor")),
    ("adapters None", lambda: good(adapters=None), TypeError, words("adapters", "NoneType")),
    ("one adapter, not in a list", lambda: good(adapters=adapter()), TypeError, words(r"adapters\[0\]", "Tensor")),
    ("an adapter of three", lambda: good(adapters=[(*adapter(), 2.0)]), TypeError, words(r"adapters\[0\]", "3")),
    ("an adapter with a scale", lambda: good(adapters=[(2.0, 1.0)]), TypeError, words(r"adapters\[0\]\[0\]", "float")),
    (
        "integer adapter",
        lambda: good(adapters=[adapter(), (adapter()[0], torch.ones(V, 2).long())]),
        TypeError,
        words(r"adapters\[1\]\[1\]", "int64"),
    ),
    (
        "adapter of another dtype",
        lambda: good(adapters=[tuple(t.to(bf16) for t in adapter())]),
        TypeError,
        words(r"adapters\[0\]\[0\]", "float32", "bfloat16"),
    ),
    (
        "ranks of an adapter differ",
        lambda: good(adapters=[(torch.ones(N, 3), torch.ones(V, 2))]),
        ValueError,
        words(r"adapters\[0\]\[0\]", rf"\({N}, 2\)", rf"\({N}, 3\)"),
    ),
    (
        "adapter of another head",
        lambda: good(adapters=[(torch.ones(N, 2), torch.ones(V + 1, 2))]),
        ValueError,
        words(r"adapters\[0\]\[1\]", V, V + 1),
    ),
    (
        "adapter of other tokens",
        lambda: good(adapters=[(torch.ones(N + 1, 2), torch.ones(V, 2))]),
        ValueError,
        words(r"adapters\[0\]\[0\]", N, N + 1),
    ),
    (
        "adapter transposed",
        lambda: good(adapters=[(torch.ones(N, 2), torch.ones(2, V))]),
        ValueError,
        words(r"^adapters\[0\]\[1\]", V, r"give adapters\[0\]\[1\]\.t\(\)"),
    ),
    (
        "adapter with flat tokens",
        lambda: good(input=torch.ones(2, 3, H), target=torch.zeros(2, 3).long(), adapters=[adapter()]),
        ValueError,
        words(r"adapters\[0\]\[0\]", r"\(2, 3, 2\)"),
    ),
    ("adapter 1-d", lambda: good(adapters=[(torch.ones(N, 1), torch.ones(V))]), ValueError, words(r"adapters\[0\]", V)),
    (
        "adapter 0-d",
        lambda: good(adapters=[(torch.ones(N, 1), torch.tensor(1.0))]),
        ValueError,
        words(r"adapters\[0\]"),
    ),
    (
        "adapter of rank 0",
        lambda: good(adapters=[(torch.ones(N, 0), torch.ones(V, 0))]),
        ValueError,
        words(r"adapters\[0\]\[1\]", "r > 0"),
    ),
    (
        "adapter on another device",
        lambda: good(adapters=[(adapter()[0], adapter()[1].to("meta"))]),
        ValueError,
        words(r"adapters\[0\]\[1\]", "meta", "cpu"),
    ),
    (
        "adapter of a K-dimensional head",
        lambda: good(linear_weight=torch.ones(V, 3, H), target=torch.zeros(N, 3).long(), adapters=[adapter()]),
        ValueError,
        words("adapters", "two-dimensional"),
    ),
    (
        "adapter of another head, probabilities",
        lambda: good(target=probabilities(), adapters=[(torch.ones(N, 2), torch.ones(V + 1, 2))]),
        ValueError,
        words(r"adapters\[0\]\[1\]", V, V + 1),
    ),
    # ---- scalars out of range
    ("reduction unknown", lambda: good(reduction="avg"), ValueError, words("reduction", "avg", "mean")),
    ("reduction empty", lambda: good(reduction=""), ValueError, words("reduction", "mean")),
    ("reduction upper case", lambda: good(reduction="MEAN"), ValueError, words("MEAN", "mean")),
    ("smoothing < 0", lambda: good(label_smoothing=-0.1), ValueError, words("label_smoothing", "-0.1")),
    ("smoothing > 1", lambda: good(label_smoothing=1.1), ValueError, words("label_smoothing", "1.1")),
    ("smoothing NaN", lambda: good(label_smoothing=math.nan), ValueError, words("label_smoothing", "nan")),
    ("softcap 0", lambda: good(softcap=0.0), ValueError, words("softcap", "0")),
    ("softcap < 0", lambda: good(softcap=-30.0), ValueError, words("softcap", "-30")),
    ("softcap infinite", lambda: good(softcap=math.inf), ValueError, words("softcap", "inf")),
    ("softcap NaN", lambda: good(softcap=math.nan), ValueError, words("softcap", "nan")),
    ("temperature 0", lambda: good(temperature=0.0), ValueError, words("temperature", "0")),
    ("temperature < 0", lambda: good(temperature=-1.0), ValueError, words("temperature", "-1")),
    ("temperature NaN", lambda: good(temperature=math.nan), ValueError, words("temperature", "nan")),
    ("logit_scale infinite", lambda: good(logit_scale=math.inf), ValueError, words("logit_scale", "inf")),
    ("logit_scale NaN", lambda: good(logit_scale=math.nan), ValueError, words("logit_scale", "nan")),
    ("z_loss < 0", lambda: good(z_loss=-0.1), ValueError, words("z_loss", "-0.1")),
    ("z_loss NaN", lambda: good(z_loss=math.nan), ValueError, words("z_loss", "nan")),
    ("statistics in a string", lambda: good(stats="lse"), TypeError, words("stats", "lse")),
    ("ignore_index beyond 64 bits", lambda: good(ignore_index=2**70), ValueError, words("ignore_index", "64")),
    ("num_items not a number", lambda: good(reduction="sum", num_items=float("nan")), ValueError, words("num_items")),
    ("unknown statistic", lambda: good(stats=("lse", "mean")), ValueError, words("mean", "lse", "entropy")),
    ("a statistic that is a list", lambda: good(stats=([],)), ValueError, words("unknown stat", "lse", "entropy")),
    ("shift < 0", lambda: good(shift=-1), ValueError, words("shift", "-1")),
    ("shift > N", lambda: good(shift=N + 1), ValueError, words("length of the sequence", rf"\({N},\)", N + 1)),
    (
        "shift of a 0-d target",
        lambda: good(input=torch.ones(H), target=torch.tensor(0), shift=1),
        ValueError,
        words("shift"),
    ),
    ("num_items of a mean", lambda: good(num_items=4), ValueError, words("num_items", "sum", "mean")),
    ("num_items of none", lambda: good(num_items=4, reduction="none"), ValueError, words("num_items", "none")),
    ("num_items 0", lambda: good(num_items=0, reduction="sum"), ValueError, words("num_items", 0)),
    *(
        (
            f"num_items {count!r}",
            lambda count=count, changes=changes: good(num_items=count, reduction="sum", **changes),
            ValueError,
            words("num_items", -3),
        )
        for count, changes in (
            (-3, {}),
            (torch.tensor(-3), {}),
            (torch.tensor(-3.0), {"linear_weight": torch.ones(V, 2, H), "target": torch.zeros(N, 2).long()}),
        )
    ),
    (
        "a class weight with a gradient",
        lambda: good(weight=torch.ones(V, requires_grad=True)),
        ValueError,
        words("weight gets no gradient", r"weight\.detach\(\)"),
    ),
    ("vocab_size without a group", lambda: good(vocab_size=V), ValueError, f"^vocab_size={V} needs a process_group"),
    ("num_items of two", lambda: good(num_items=torch.ones(2), reduction="sum"), ValueError, words("num_items", "2")),
    # ---- devices
    (
        "head on another device",
        lambda: good(linear_weight=torch.ones(V, H, device="meta")),
        ValueError,
        words("cpu", "meta", "linear_weight"),
    ),
    (
        "target on another device",
        lambda: good(target=torch.zeros(N, device="meta").long()),
        ValueError,
        words("cpu", "meta", "target"),
    ),
    (
        "bias on another device",
        lambda: good(linear_bias=torch.ones(V, device="meta")),
        ValueError,
        words("cpu", "meta", "linear_bias"),
    ),
    (
        "class weight on another device",
        lambda: good(weight=torch.ones(V, device="meta")),
        ValueError,
        words("cpu", "meta", "weight"),
    ),
    # ---- options
    (
        "budget below the least",
        lambda: good(options=flce.ChunkOptions(max_workspace_bytes=1)),
        ValueError,
        words("max_workspace_bytes", "least", r"\d{2,}"),
    ),
    (
        "budget below the least, tokens",
        lambda: good(options=flce.ChunkOptions(max_workspace_bytes=1, strategy="tokens")),
        ValueError,
        words("max_workspace_bytes", "least", r"\d{2,}"),
    ),
    (
        "budget below the least, vocab",
        lambda: good(options=flce.ChunkOptions(max_workspace_bytes=1, strategy="vocab")),
        ValueError,
        words("max_workspace_bytes", "least", r"\d{2,}"),
    ),
    (
        "budget <= 0",
        lambda: good(options=flce.ChunkOptions(max_workspace_bytes=-5)),
        ValueError,
        words("max_workspace_bytes"),
    ),
    *(
        (
            f"budget {size!r}",
            lambda size=size: good(options=flce.ChunkOptions(max_workspace_bytes=size)),
            error,
            words("max_workspace_bytes", "size"),
        )
        for size, error in (("12", ValueError), ("-3MiB", ValueError), ("1 byte", ValueError), (b"", TypeError))
    ),
    ("chunk_rows 0", lambda: good(options=flce.ChunkOptions(chunk_rows=0)), ValueError, words("chunk_rows", 0)),
    ("chunk_rows < 0", lambda: good(options=flce.ChunkOptions(chunk_rows=-8)), ValueError, words("chunk_rows", -8)),
    (
        "unknown strategy",
        lambda: good(options=flce.ChunkOptions(strategy="rows")),  # type: ignore[arg-type]
        ValueError,
        words("rows", "tokens", "vocab"),
    ),
    (
        "sums in float16",
        lambda: good(options=flce.ChunkOptions(accum_dtype=torch.float16)),
        ValueError,
        "accum_dtype must be bfloat16, float32 or float64, got torch.float16",
    ),
    (
        "logits of integers",
        lambda: good(options=flce.ChunkOptions(logits_dtype=torch.int64)),
        ValueError,
        words("logits_dtype", "got torch.int64"),
    ),
    (
        "a string for the dtype of sums",
        lambda: good(options=flce.ChunkOptions(accum_dtype="bfloat16")),  # type: ignore[arg-type]
        TypeError,
        "accum_dtype must be a torch.dtype, got 'bfloat16': give torch.bfloat16",
    ),
    (
        "a string for the dtype of logits",
        lambda: good(options=flce.ChunkOptions(logits_dtype="torch.float32")),  # type: ignore[arg-type]
        TypeError,
        "logits_dtype must be None or a torch.dtype, got 'torch.float32': give torch.float32",
    ),
    (
        "another string for the dtype of logits",
        lambda: good(options=flce.ChunkOptions(logits_dtype="half precision")),  # type: ignore[arg-type]
        TypeError,
        "got 'half precision'$",
    ),
    # ---- targets out of range
    ("target V", lambda: good(target=torch.tensor([0, 1, V, 3, 4, 5])), IndexError, words(rf"\b{V}\b", r"\b2\b")),
    ("target -1", lambda: good(target=torch.tensor([0, 1, 2, 3, -1, 5])), IndexError, words("-1", r"\b4\b")),
    (
        "target -100 when another is ignored",
        lambda: good(target=torch.tensor([0, -100, 2, 3, 4, 5]), ignore_index=-1),
        IndexError,
        words("-100", r"\b1\b"),
    ),
    (
        "target far outside",
        lambda: good(target=torch.tensor([0, 1, 2, 2**40, 4, 5])),
        IndexError,
        words(2**40, r"\b3\b"),
    ),
    (
        "target outside whose low 32 bits are inside",
        lambda: good(target=torch.tensor([0, 1, 2, 3, 4, 2**32 + 3])),
        IndexError,
        words(2**32 + 3, r"\b5\b"),
    ),
    (
        "target outside, int32",
        lambda: good(target=torch.tensor([0, 1, 77, 3, 4, 5], dtype=torch.int32)),
        IndexError,
        words(77, r"\b2\b"),
    ),
    (
        "target outside, no reduction",
        lambda: good(target=torch.tensor([0, 1, 77, 3, 4, 5]), reduction="none"),
        IndexError,
        words(77, r"\b2\b"),
    ),
    (
        "target outside, two leading dims",
        lambda: good(input=torch.ones(2, 3, H), target=torch.tensor([[0, 1, 2], [3, 77, 5]])),
        IndexError,
        "77 at position 4 of the flattened target is",
    ),
    (
        "target outside, shifted",
        lambda: good(target=torch.tensor([0, 1, 77, 3, 4, 5]), shift=1),
        IndexError,
        "77 at position 2 of the flattened target is",
    ),
    (
        "target outside, vocab strategy",
        lambda: good(target=torch.tensor([0, 1, 77, 3, 4, 5]), options=flce.ChunkOptions(strategy="vocab")),
        IndexError,
        words(77, r"\b2\b"),
    ),
    ("target outside, one position", lambda: good(input=torch.ones(H), target=torch.tensor(V)), IndexError, words(V)),
]


def test_the_call_without_a_mistake_works(backend: str) -> None:
    """Otherwise every row below would prove nothing."""
    loss = flce.fused_linear_cross_entropy(**good())
    assert isinstance(loss, Tensor)
    assert loss.isfinite()


@pytest.mark.parametrize("arguments, error, message", [r[1:] for r in ROWS], ids=[r[0] for r in ROWS])
def test_bad_input(arguments: Callable[[], dict[str, Any]], error: type[Exception], message: str, backend: str) -> None:
    with pytest.raises(error, match=message) as caught:
        flce.fused_linear_cross_entropy(**arguments())
    assert type(caught.value) is error


@pytest.mark.parametrize("arguments, error, message", [r[1:] for r in ROWS], ids=[r[0] for r in ROWS])
def test_bad_input_with_gradients(
    arguments: Callable[[], dict[str, Any]], error: type[Exception], message: str, torch_backend: str
) -> None:
    """The same when a gradient is wanted: nothing is checked too late."""

    def call() -> None:
        kwargs = arguments()
        for name in ("input", "linear_weight", "linear_bias"):
            value = kwargs.get(name)
            if isinstance(value, Tensor) and value.is_floating_point():
                kwargs[name] = value.requires_grad_()
        flce.fused_linear_cross_entropy(**kwargs)

    with pytest.raises(error, match=message):
        call()


def test_reduction_that_is_no_string(backend: str) -> None:
    with pytest.raises((TypeError, ValueError), match="reduction"):
        flce.fused_linear_cross_entropy(**good(reduction=None))


def test_unknown_argument(backend: str) -> None:
    with pytest.raises(TypeError, match="smoothing"):
        flce.fused_linear_cross_entropy(**good(smoothing=0.1))


def test_an_error_leaves_nothing_behind(backend: str) -> None:
    """A good call after a bad one, on the same tensors, is right."""
    arguments = good()
    expected = flce.fused_linear_cross_entropy(**arguments)
    with pytest.raises(IndexError):
        flce.fused_linear_cross_entropy(**{**arguments, "target": torch.full((N,), V)})
    assert torch.equal(flce.fused_linear_cross_entropy(**arguments), expected)


def test_ignored_target_outside_is_no_error(backend: str) -> None:
    for ignore_index in (-1, V, -100, 10**6):
        arguments = good(ignore_index=ignore_index)
        arguments["target"][2] = ignore_index
        loss = flce.fused_linear_cross_entropy(**arguments)
        assert isinstance(loss, Tensor)
        assert loss.isfinite()


def test_a_budget_in_words() -> None:
    assert flce.ChunkOptions(max_workspace_bytes="256MiB") == flce.ChunkOptions(max_workspace_bytes=256 << 20)


def test_a_class_weight_with_a_gradient_where_none_is_made(torch_backend: str) -> None:
    """As PyTorch: with gradients off, and with class probabilities, it is as good as another."""
    weight = torch.ones(V, requires_grad=True)
    with torch.no_grad():
        flce.fused_linear_cross_entropy(**good(weight=weight))
    loss: Any = flce.fused_linear_cross_entropy(**good(weight=weight, target=probabilities()))
    loss.backward()
    assert weight.grad is not None


def test_values_of_the_debug_variable(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    for value in ("", "0", "1"):
        monkeypatch.setenv("FLCE_DEBUG", value)
        flce.fused_linear_cross_entropy(**good())
    monkeypatch.setenv("FLCE_DEBUG", "foo")
    with pytest.raises(ValueError, match="FLCE_DEBUG must be 0 or 1, got 'foo'"):
        flce.fused_linear_cross_entropy(**good())


def loss_of(x: Tensor, weight: Tensor, target: Tensor) -> Any:
    return flce.fused_linear_cross_entropy(x, weight, target)


def logprobs_of(x: Tensor, weight: Tensor, target: Tensor) -> Any:
    logprob: Any = flce.linear_logprobs(x, weight, target).logprob
    return logprob.sum()


@pytest.mark.parametrize("function", [loss_of, logprobs_of])
def test_transforms(function: Callable[..., Any], torch_backend: str) -> None:
    """Of the operator's tensors they are refused; around a call with others they change nothing."""
    x, weight, target = good().values()
    for transform, argnums, name in (
        (torch.func.grad, 0, "grad, vjp and jacrev"),
        (torch.func.jacrev, 1, "grad, vjp and jacrev"),
        (torch.func.hessian, 0, "forward-mode|grad, vjp"),
    ):
        with pytest.raises(RuntimeError, match=f"does not support .*({name}).*torch.autograd.grad"):
            transform(function, argnums)(x, weight, target)
    batches = [t.expand(2, *t.shape) for t in (x, weight, target)]
    for k in range(3):
        arguments = [batches[i] if i == k else t for i, t in enumerate((x, weight, target))]
        in_dims = tuple(0 if i == k else None for i in range(3))
        with pytest.raises(RuntimeError, match=r"does not support torch.func.vmap: use .* as more tokens"):
            torch.func.vmap(function, in_dims)(*arguments)
    expected = function(x, weight, target)
    assert torch.equal(torch.func.grad(lambda s: function(x, weight, target) * s)(torch.tensor(2.0)), expected)
    assert torch.equal(torch.func.vmap(lambda s: function(x, weight, target) * s)(torch.ones(2))[1], expected)


@pytest.mark.parametrize("strategy", ["auto", "tokens", "vocab"])
def test_bounds_beyond_64_bits(strategy: Any, backend: str) -> None:
    """They are bounds like any other that is large enough, not an overflow in the dispatcher."""
    arguments = good(input=good()["input"].requires_grad_())
    expected = flce.fused_linear_cross_entropy(**arguments, options=flce.ChunkOptions(strategy=strategy))
    for bound in (2**63 - 1, 2**63, 2**200):
        for name in ("max_workspace_bytes", "chunk_rows"):
            options = flce.ChunkOptions(strategy=strategy, **{name: bound})  # type: ignore[arg-type]
            loss: Any = flce.fused_linear_cross_entropy(**arguments, options=options)
            torch.testing.assert_close(loss, expected)
            loss.backward()


MODULE_ROWS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("reduction", {"reduction": "avg"}, ValueError, "avg"),
    ("smoothing", {"label_smoothing": 1.5}, ValueError, "label_smoothing"),
    ("softcap", {"softcap": -1.0}, ValueError, "softcap"),
    ("temperature", {"temperature": 0.0}, ValueError, "temperature"),
    ("z_loss", {"z_loss": -1.0}, ValueError, "z_loss"),
    ("stats", {"stats": ("nothing",)}, ValueError, "nothing"),
    ("shift", {"shift": -1}, ValueError, "shift"),
    ("options", {"options": 3}, TypeError, "options"),
    ("weight", {"weight": torch.ones(V + 2)}, ValueError, "weight"),
    ("weight a list", {"weight": [1.0] * V}, TypeError, "weight must be a Tensor, got list"),
    ("unknown", {"smoothing": 0.1}, TypeError, "smoothing"),
]


@pytest.mark.parametrize(
    "sizes, kwargs, error, message",
    [
        (("a", 5), {}, TypeError, "in_features must be an int, got str"),
        ((0, 5), {}, ValueError, "in_features must be > 0, got 0"),
        ((5, -1), {}, ValueError, "num_classes must be > 0, got -1"),
        ((5, 2.0), {}, TypeError, "num_classes must be an int, got float"),
        ((5, 2), {"bias": "no"}, TypeError, "bias must be a bool, got str"),
        ((5, 2), {"dtype": "bfloat16"}, TypeError, "dtype must be .* got 'bfloat16': give torch.bfloat16"),
    ],
    ids=str,
)
def test_bad_sizes_of_a_head(sizes: Any, kwargs: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        flce.LinearCrossEntropyLoss(*sizes, **kwargs)


@pytest.mark.parametrize("kwargs, error, message", [r[1:] for r in MODULE_ROWS], ids=[r[0] for r in MODULE_ROWS])
def test_bad_input_of_modules(kwargs: dict[str, Any], error: type[Exception], message: str) -> None:
    """Whether it is found when the module is made or when it is called."""
    arguments = good()
    with pytest.raises(error, match=message):
        flce.LinearCrossEntropyLoss(H, V, **kwargs)(arguments["input"], arguments["target"])
    with pytest.raises(error, match=message):
        flce.FusedLinearCrossEntropyLoss(**kwargs)(**arguments)


@pytest.mark.parametrize(
    "kwargs, error, message",
    [
        ({"num_tokens": -1}, ValueError, words("num_tokens|tokens|N", -1)),
        ({"hidden_size": 0}, ValueError, words("hidden_size|H", 0)),
        ({"vocab_size": 0}, ValueError, words("vocab_size|V", 0)),
        ({"adapter_ranks": (8, 0)}, ValueError, words(r"adapter_ranks\[1\]", 0)),
        ({"adapter_ranks": (8.0,)}, TypeError, words(r"adapter_ranks\[0\]", "float")),
        ({"adapter_ranks": 8}, TypeError, words("adapter_ranks", "int")),
        ({"reduction": "avg"}, ValueError, words("avg", "mean")),
        ({"options": {"chunk_rows": 1}}, TypeError, words("ChunkOptions")),
        ({"device": "toaster"}, ValueError, "device must be a device such as 'cuda' or 'cpu', got 'toaster'"),
        ({"dtype": torch.int64}, TypeError, words("int64")),
        ({"dtype": "bfloat16"}, TypeError, "dtype must be a torch.dtype, got 'bfloat16': give torch.bfloat16"),
    ],
    ids=str,
)
def test_bad_input_of_plan(kwargs: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"num_tokens": 8, "hidden_size": 8, "vocab_size": 16, "dtype": f32}
    with pytest.raises(error, match=message):
        flce.plan(**{**arguments, "device": "cpu", **kwargs})
