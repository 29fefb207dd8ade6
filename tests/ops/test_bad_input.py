"""Documented errors: the type of each, and a message with the given and the expected value."""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor

import flce
from flce.core import log
from flce.huggingface import trl

N, H, V = 6, 8, 20
f32, f64, bf16, float8 = torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn
ones, Options = torch.ones, flce.ChunkOptions


def good(**changes: Any) -> dict[str, Any]:
    """Return the arguments of a valid call, with ``changes``."""
    g = torch.Generator().manual_seed(0)
    arguments: dict[str, Any] = {
        "input": torch.randn(N, H, generator=g),
        "linear_weight": torch.randn(V, H, generator=g),
        "target": torch.randint(0, V, (N,), generator=g),
    }
    arguments.update(changes)
    return arguments


def indices(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def at(position: int, value: int) -> Tensor:
    target = torch.arange(N)
    target[position] = value
    return target


def adapted(a: Any, b: Any) -> dict[str, Any]:
    """Return one adapter: numbers are ranks, tuples are shapes."""
    a = ones(N, a) if isinstance(a, int) else ones(a) if isinstance(a, tuple) else a
    b = ones(V, b) if isinstance(b, int) else ones(b) if isinstance(b, tuple) else b
    return {"adapters": [(a, b)]}


class Packed(Tensor):
    """Tensor whose elements are not its values, as in torchao's quantised tensors."""

    def dequantize(self) -> Tensor:
        return self.as_subclass(Tensor) * 2


PAIR = ones(N, 2), ones(V, 2)
STOCK = "for class probabilities use torch.nn.functional.cross_entropy"
NESTED = [torch.nested.nested_tensor([ones(2, H), ones(3, H)], layout=kind) for kind in (torch.strided, torch.jagged)]
QUANTISED = "linear_weight must be float16, …a quantised head"
ORDER = "hidden states come first, then linear_weight, then target"

# The error, parts of its message, and the changes to a valid call.
Case = tuple[type[Exception], str, dict[str, Any]]

# Arguments of both losses that are not tensors. The modules check them, too.
SCALARS: list[Case] = [
    *(
        (TypeError, f"{name} must be a number, got {type(value).__name__}", {name: value})
        for name in ("softcap", "logit_scale", "temperature", "z_loss", "label_smoothing")
        for value in ("1", None, True)
        if (name, value) not in (("softcap", None), ("label_smoothing", True))
    ),
    (TypeError, "softcap must be a number, got a torch.float32 tensor of shape (2,)", {"softcap": ones(2)}),
    (TypeError, "temperature must be …got …that requires grad", {"temperature": torch.ones((), requires_grad=True)}),
    (TypeError, "ignore_index must be an int, got bool", {"ignore_index": True}),
    (TypeError, "ignore_index must be an int, got a torch.float32 tensor", {"ignore_index": torch.tensor(1.0)}),
    (ValueError, "ignore_index must fit into 64 bits, got 1180591620717411303424", {"ignore_index": 2**70}),
    (TypeError, "shift must be an int, got float", {"shift": 1.5}),
    (ValueError, "shift must be >= 0, got -1", {"shift": -1}),
    (ValueError, f"shift must be at most the length of the sequence…({N},), got {N + 1}", {"shift": N + 1}),
    *(
        (ValueError, f"reduction must be 'none', 'mean' or 'sum', got {value!r}", {"reduction": value})
        for value in ("avg", None)
    ),
    *(
        (ValueError, f"label_smoothing must be in [0, 1], got {value}", {"label_smoothing": value})
        for value in (-0.1, 1.1)
    ),
    *(
        (ValueError, f"softcap must be None or a finite number > 0, got {value}", {"softcap": value})
        for value in (0.0, math.inf, math.nan)
    ),
    *(
        (ValueError, f"temperature must be a finite number > 0, got {value}", {"temperature": value})
        for value in (0.0, math.nan)
    ),
    *(
        (ValueError, f"logit_scale must be finite, got {value}", {"logit_scale": value})
        for value in (math.inf, math.nan)
    ),
    *(
        (ValueError, f"z_loss must be a finite number >= 0, got {value}", {"z_loss": value})
        for value in (-0.1, math.nan)
    ),
    (ValueError, "empty_loss must be 'nan' or 'zero', got 'none'", {"empty_loss": "none"}),
    (TypeError, "stats must be a tuple of names out of ('lse', …got 'lse'", {"stats": "lse"}),
    (ValueError, "unknown stat 'mean'; expected any of ('lse', ", {"stats": ("lse", "mean")}),
    (TypeError, "num_items must be a number, got list", {"num_items": [3], "reduction": "sum"}),
    *(
        (TypeError, f"num_items must be …got a {count.dtype} tensor", {"num_items": count, "reduction": "sum"})
        for count in (torch.tensor(3 + 0j), torch.tensor(True))
    ),
    *(
        (ValueError, f"num_items needs reduction='sum', got reduction={name!r}", {"num_items": 4, "reduction": name})
        for name in ("mean", "none")
    ),
    *(
        (ValueError, f"num_items must be > 0…got {count}", {"num_items": count, "reduction": "sum"})
        for count in (0, -3, math.nan)
    ),
    (ValueError, "num_items must be >= 0, got -3", {"num_items": torch.tensor(-3), "reduction": "sum"}),
    (ValueError, "num_items must be a number or a 0-d tensor, got …(2,)", {"num_items": ones(2), "reduction": "sum"}),
    (ValueError, f"vocab_size={V} needs a process_group", {"vocab_size": V}),
    (TypeError, "process_group must be a torch.distributed.ProcessGroup, got str", {"process_group": "world"}),
    (TypeError, "smoothing", {"smoothing": 0.1}),
    (ValueError, "weight gets no gradient…give weight.detach()", {"weight": ones(V, requires_grad=True)}),
    (ValueError, f"weight must have shape ({V},) with …got ({V + 1},)", {"weight": ones(V + 1)}),
    (TypeError, "weight must be a Tensor, got list", {"weight": [1.0] * V}),
    (TypeError, "weight must have a floating dtype, got torch.int64", {"weight": ones(V).long()}),
]

CASES: list[Case] = [
    # ---- not a tensor
    (TypeError, "input must be a Tensor, got list", {"input": [[0.0] * H] * N}),
    (TypeError, "linear_weight must be a Tensor, got float", {"linear_weight": 0.5}),
    (TypeError, "target must be a Tensor, got list", {"target": [0] * N}),
    (TypeError, "target must be a Tensor, got NoneType", {"target": None}),
    (TypeError, "linear_bias must be a Tensor, got list", {"linear_bias": [0.0] * V}),
    (TypeError, "token_weight must be a Tensor, got list", {"token_weight": [1.0] * N}),
    (TypeError, "options must be None or a flce.ChunkOptions, got dict", {"options": {"chunk_rows": 4}}),
    # ---- dtypes
    *(
        (TypeError, f"input must have a floating dtype, got {dtype}", {"input": ones(N, H).to(dtype)})
        for dtype in (torch.int64, torch.bool, torch.complex64)
    ),
    (TypeError, "linear_weight must have a floating dtype, got torch.int32", {"linear_weight": ones(V, H).int()}),
    (TypeError, "linear_bias must have a floating dtype, got torch.int64", {"linear_bias": ones(V).long()}),
    (TypeError, "token_weight must have a floating dtype, got torch.bool", {"token_weight": ones(N).bool()}),
    (TypeError, "input and linear_weight must have one dtype…and torch.bf", {"linear_weight": ones(V, H, dtype=bf16)}),
    (TypeError, "linear_bias must have the dtype of input, …got torch.float64", {"linear_bias": ones(V, dtype=f64)}),
    (TypeError, "input must be …float8", {"input": ones(N, H).to(float8), "linear_weight": ones(V, H).to(float8)}),
    *(
        (TypeError, f"target must hold class indices in int64 or int32, got {dtype}", {"target": ones(N).to(dtype)})
        for dtype in (torch.int16, torch.uint8, torch.bool, torch.complex64)
    ),
    *(
        (TypeError, f"torch.float32: for indices give target.long(), {STOCK}(torch.nn.", {"target": ones(shape)})
        for shape in ((N,), (N, V), (N, V + 1))
    ),
    # ---- layouts and quantised heads
    *(
        (TypeError, f"input must be a dense tensor, got one of layout {x.layout}: give input.to_dense()", {"input": x})
        for x in (ones(N, H).to_sparse(), ones(N, H).to_sparse_csr(), ones(N, H).to_mkldnn())
    ),
    (TypeError, "target must be a dense tensor, got …torch.sparse_coo", {"target": ones(N).long().to_sparse()}),
    *((TypeError, "got a nested tensor: give…torch.cat(input.unbind())", {"input": x}) for x in NESTED),
    (TypeError, f"{QUANTISED}", {"linear_weight": ones(V, H).to(torch.int8)}),
    (TypeError, f"got a Packed of torch.float32…{QUANTISED[-14:]}", {"linear_weight": Packed(ones(V, H))}),
    # ---- the order of the arguments
    (TypeError, f"input must have a floating dtype, got …int64: {ORDER}", {"input": indices(N), "target": ones(N, H)}),
    (TypeError, f"linear_weight must …int32: {ORDER}", {"linear_weight": indices(N).int(), "target": ones(V, H)}),
    (ValueError, f"target must have shape …{ORDER}", {"input": ones(V, H), "linear_weight": ones(N, H)}),  # as Liger
    (
        ValueError,
        f"linear_weight must have shape (V, H), got (2, 3, {H}): {ORDER}",
        {"input": ones(V, H), "linear_weight": ones(2, 3, H), "target": indices(2, 3), "shift": 1},
    ),
    # ---- shapes
    (ValueError, "input must have shape (..., H), got a 0-d tensor", {"input": torch.tensor(1.0)}),
    (ValueError, f"linear_weight must have shape (V, H), got ({H},)", {"linear_weight": ones(H)}),
    (ValueError, f"the H of input, {H}, got ({V}, {H + 1})", {"linear_weight": ones(V, H + 1)}),
    (ValueError, f"got ({H}, {V}) …give linear_weight.t()", {"linear_weight": ones(H, V)}),
    (ValueError, f"linear_weight must have V > 0 and H > 0, got shape (0, {H})", {"linear_weight": ones(0, H)}),
    (ValueError, "got (20, 3, 8): for a head of more dimensions use torch.nn.", {"linear_weight": ones(V, 3, H)}),
    *(
        (ValueError, f"target must have shape ({N},) with …got {shape}", {"target": indices(*shape)})
        for shape in ((N + 1,), (N, 1), ())
    ),
    (ValueError, "target must have shape (2, 3) with …got (3, 2)", {"input": ones(2, 3, H), "target": indices(3, 2)}),
    *(
        (ValueError, f"linear_bias must have shape ({V},) with …got {shape}", {"linear_bias": ones(shape)})
        for shape in ((V - 1,), (1,), (1, V))
    ),
    (ValueError, f"token_weight must have shape ({N},) with …got ({V},)", {"token_weight": ones(V)}),
    (ValueError, "shift needs a target with …one dimension", {"input": ones(H), "target": torch.tensor(0), "shift": 1}),
    # ---- adapters
    (TypeError, "adapters[0][1] must be a Tensor, got list", adapted(2, [[0.0] * 2] * V)),
    (TypeError, "adapters must be a sequence of pairs of tensors, got Tensor", {"adapters": ones(N, 2)}),
    (TypeError, "adapters[0] must be a pair of tensors …got Tensor", {"adapters": PAIR}),
    (TypeError, "adapters[0] must be a pair of tensors …got 3 values", {"adapters": [(*PAIR, 2.0)]}),
    (TypeError, "input and adapters[0][0] must have one dtype", adapted(ones(N, 2).to(bf16), ones(V, 2).to(bf16))),
    *(
        (ValueError, f"adapters[0][0] must have shape ({N}, 2) with …got {a}", adapted(a, 2))
        for a in ((N, 3), (N + 1, 2))
    ),
    *(
        (ValueError, f"adapters[0][1] must have shape (V, r) …{V}, and r > 0, got {b}", adapted(2, b))
        for b in ((V + 1, 2), (V,), (), (V, 0))
    ),
    # ---- devices
    *(
        (ValueError, f"got input on cpu and {name} on meta", {name: tensor.to("meta")})
        for name, tensor in good(linear_bias=ones(V), weight=ones(V), token_weight=ones(N)).items()
        if name != "input"
    ),
    # ---- budgets
    *(
        (ValueError, "max_workspace_bytes=1 …the least is ", {"options": Options(None, 1, strategy)})
        for strategy in ("auto", "tokens", "vocab")
    ),
    # ---- targets out of range
    *(
        (IndexError, f"target {value} at position {position} of the flat", {"target": at(position, value), **changes})
        for position, value, changes in (
            (2, V, {}),
            (4, -1, {}),
            (1, -100, {"ignore_index": -1}),
            (3, 2**40, {}),
            (5, 2**32 + 3, {}),  # the low 32 bits are in range
            (2, 77, {"shift": 1}),
        )
    ),
    (IndexError, "target 77 at position 2 of", {"target": at(2, 77).int()}),
    (IndexError, "target 77 at position 4 of", {"input": ones(2, 3, H), "target": at(4, 77).view(2, 3)}),
    (IndexError, f"target {V} at position 0 of", {"input": ones(H), "target": torch.tensor(V)}),
]

# Errors of `cross_entropy`, in addition to SCALARS.
LOGITS_CASES: list[Case] = [
    (TypeError, "logits must be a Tensor, got list", {"logits": [[0.0]]}),
    (TypeError, "token_weight must have a floating dtype, got torch.bool", {"token_weight": ones(N).bool()}),
    (TypeError, "logits must have a floating dtype, got torch.int64", {"logits": ones(N, V).long()}),
    (TypeError, "logits must be float16, …got torch.float8", {"logits": ones(N, V).to(float8)}),
    (ValueError, "logits must have shape (..., V), got a 0-d", {"logits": torch.tensor(1.0), "target": indices()}),
    (ValueError, f"target must have shape ({N},) …got (5,)", {"target": indices(5)}),
    (ValueError, "give logits.movedim(1, -1)", {"logits": ones(N, V, 5), "target": indices(N, 5)}),
    (TypeError, f"torch.float32: for indices give target.long(), {STOCK}(logits, target)", {"target": ones(N, V)}),
    (ValueError, f"token_weight must have shape ({N},) …got ({V},)", {"token_weight": ones(V)}),
    (ValueError, "shift needs a target", {"logits": ones(9), "target": torch.tensor(0), "shift": 1}),
    (TypeError, "inplace must be a bool, got int", {"inplace": 1}),
    (IndexError, f"target {V} at position 2 of the flat", {"target": at(2, V)}),
]


class LM(torch.nn.Module):
    """Language model with a loss, which shifts the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.lm_head = torch.nn.Embedding(V, H), torch.nn.Linear(H, V)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.lm_head

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        assert labels is not None
        logits = self.lm_head(self.emb(ids))
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def import_with(variable: str) -> None:
    with mock.patch.dict(os.environ, {variable: "1"}), warnings.catch_warnings():
        warnings.simplefilter("error")
        log.configure_from_environment()


linear, of_logits, patch = (
    cast(Any, f) for f in (flce.fused_linear_cross_entropy, flce.cross_entropy, flce.patch_model)
)
SEQUENCES, TOKENS, SIZES = (ones(2, 5, H), ones(V, H)), tuple(good().values()), (8, 8, 16, f32)
NEXT = "to predict the next token, do not shift before the call; give shift=1"
LABELS = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 77]])
# Functions with options, and the first arguments of each.
WITH_OPTIONS: list[tuple[Any, tuple[Any, ...]]] = [
    (linear, TOKENS),
    (flce.linear_logprobs, TOKENS),
    (flce.linear_divergence, SEQUENCES * 2),
    (flce.plan, SIZES),
    (flce.FusedLinearCrossEntropyLoss, ()),
    (flce.LinearCrossEntropyLoss, (H, V)),
    (patch, (LM(),)),
]

# What to do: the end of a message, and a call.
HINTS: list[tuple[str, Callable[[], Any]]] = [
    (f"got (2, 4): {NEXT}", partial(linear, *SEQUENCES, indices(2, 4))),
    (f"got (2, 6): {NEXT}", partial(linear, *SEQUENCES, indices(2, 6))),
    (f"got (2, 4): {NEXT}", partial(flce.linear_logprobs, *SEQUENCES, indices(2, 4))),
    (f"got (2, 4): {NEXT}", partial(of_logits, ones(2, 5, V), indices(2, 4))),
    ("got bool: give shift=1", partial(linear, *TOKENS, shift=True)),
    ("got bool: give shift=0", partial(flce.CrossEntropyLoss, shift=False)),
    ("or ignore_index=-100. To ignore it, give ignore_index=-1", partial(linear, *TOKENS[:2], at(3, -1))),
    ("To ignore it, give ignore_index=-100", partial(of_logits, ones(N, V), at(3, -100), ignore_index=-1)),
    ("or ignore_index=-100", partial(linear, *TOKENS[:2], at(3, V))),
    (
        "give linear_weight.to(input.dtype), or call under torch.autocast",
        partial(linear, TOKENS[0].half(), *TOKENS[1:]),
    ),
    (" bytes: give at least '0.01MiB'", partial(linear, *TOKENS, options=Options(None, 1))),
    ("entropy has no argument 'bias': give linear_bias=...", partial(linear, *TOKENS, bias=ones(V))),
    (
        "forward has no argument 'bias': give linear_bias=...",
        partial(flce.FusedLinearCrossEntropyLoss(), *TOKENS, bias=ones(V)),
    ),
    *(
        (f"has no argument {name!r}: give options=flce.ChunkOptions({option}=...)", partial(call, *given, **{name: 4}))
        for name, option in (("chunk_size", "chunk_rows"), ("max_workspace_bytes", "max_workspace_bytes"))
        for call, given in WITH_OPTIONS
    ),
    *(
        ("got dict: give flce.ChunkOptions(**options)", partial(call, *given, options={"chunk_rows": 4}))
        for call, given in WITH_OPTIONS
    ),
    (
        "'grad_dtype', which was removed: give sample_below=2**-12",
        partial(Options, grad_dtype=float8),  # type: ignore[call-arg]
    ),
    ("got str: give transformers.AutoModelForCausalLM.from_pretrained(...)", partial(patch, "gpt2")),
    ("labels[1, 3]: target 77 at position 5 of", partial(patch(LM()), indices(2, 4), LABELS)),
    ("needs TRL, which is not installed: pip install 'trl>=1.16'", mock.patch.dict(sys.modules, trl=None)(trl.install)),
    ("FLCE_BACKENDS: it reads FLCE_BACKEND, FLCE_DEBUG, FLCE_LOG, FLCE_PROFILE", partial(import_with, "FLCE_BACKENDS")),
]


@pytest.mark.parametrize("message, call", HINTS, ids=[hint[0][-60:] for hint in HINTS])
def test_what_to_do(message: str, call: Callable[[], Any], torch_backend: str) -> None:
    with pytest.raises((TypeError, ValueError, IndexError, ImportError, RuntimeWarning)) as caught:
        call()
    text = str(caught.value)
    assert text.endswith(message) or (message.startswith("labels") and text.startswith(message))


def refuses(function: Callable[..., Any], error: type[Exception], message: str, arguments: dict[str, Any]) -> None:
    """Check that the call raises this error, without and with gradients, and before any work."""
    for with_gradients in (False, True):
        if with_gradients:
            for name in ("input", "linear_weight", "linear_bias", "logits"):
                value = arguments.get(name)
                if isinstance(value, Tensor) and value.is_floating_point() and not value.requires_grad:
                    arguments[name] = value.detach().requires_grad_()
        with pytest.raises(error) as caught:
            function(**arguments)
        assert all(part in str(caught.value) for part in message.split("…")), caught.value


@pytest.mark.parametrize("error, message, changes", CASES, ids=[case[1][:40] for case in CASES])
def test_bad_input(error: type[Exception], message: str, changes: dict[str, Any], backend: str) -> None:
    refuses(flce.fused_linear_cross_entropy, error, message, good(**changes))


@pytest.mark.parametrize("error, message, changes", LOGITS_CASES, ids=[case[1][:40] for case in LOGITS_CASES])
def test_bad_logits(error: type[Exception], message: str, changes: dict[str, Any], torch_backend: str) -> None:
    refuses(flce.cross_entropy, error, message, {"logits": ones(N, V), "target": at(0, 0), **changes})


@pytest.mark.parametrize("error, message, changes", SCALARS, ids=[case[1][:40] for case in SCALARS])
def test_bad_input_of_all_losses(
    error: type[Exception], message: str, changes: dict[str, Any], torch_backend: str
) -> None:
    """Modules raise the error, too, in the constructor or in the call."""
    arguments = good()
    target, logits = arguments["target"], torch.ones(N, V)
    of_call = {name: value for name, value in changes.items() if name == "num_items"}
    fixed = {name: value for name, value in changes.items() if name != "num_items"}
    refuses(flce.fused_linear_cross_entropy, error, message, {**arguments, **changes})
    refuses(flce.cross_entropy, error, message, {"logits": logits, "target": target, **changes})
    refuses(
        lambda **given: flce.FusedLinearCrossEntropyLoss(**fixed)(**given), error, message, {**arguments, **of_call}
    )
    del arguments["linear_weight"]
    refuses(
        lambda **given: flce.LinearCrossEntropyLoss(H, V, **fixed)(**given), error, message, {**arguments, **of_call}
    )
    refuses(lambda **given: flce.CrossEntropyLoss(**fixed)(logits, target, **given), error, message, of_call)


@pytest.mark.parametrize(
    "error, message, options",
    [
        (ValueError, "max_workspace_bytes must be > 0, got -5", {"max_workspace_bytes": -5}),
        *(
            (ValueError, f"max_workspace_bytes must be …got {size!r}", {"max_workspace_bytes": size})
            for size in ("12", "-3MiB", "1 byte", "")
        ),
        (ValueError, "chunk_rows must be > 0, got 0", {"chunk_rows": 0}),
        (ValueError, "strategy must be 'auto', 'tokens' or 'vocab', got 'rows'", {"strategy": "rows"}),
        (ValueError, "accum_dtype must be …got torch.float16", {"accum_dtype": torch.float16}),
        (ValueError, "logits_dtype must be float16, …got torch.int64", {"logits_dtype": torch.int64}),
        (TypeError, "accum_dtype must be …'bfloat16': give torch.bfloat16", {"accum_dtype": "bfloat16"}),
        (TypeError, "logits_dtype must be …got 'torch.float32': give torch.float32", {"logits_dtype": "torch.float32"}),
        (ValueError, "skip_ignored must be True, False or 'auto', got 1", {"skip_ignored": 1}),
    ],
    ids=str,
)
def test_bad_options(error: type[Exception], message: str, options: dict[str, Any]) -> None:
    refuses(flce.ChunkOptions, error, message, options)


@pytest.mark.parametrize(
    "error, message, arguments",
    [
        (TypeError, "in_features must be an int, got str", {"in_features": "a"}),
        (ValueError, "in_features must be > 0, got 0", {"in_features": 0}),
        (ValueError, "num_classes must be > 0, got -1", {"num_classes": -1}),
        (TypeError, "bias must be a bool, got str", {"bias": "no"}),
        (TypeError, "options must be None or a flce.ChunkOptions, got int", {"options": 3}),
    ],
    ids=str,
)
def test_bad_arguments_of_a_head(error: type[Exception], message: str, arguments: dict[str, Any]) -> None:
    refuses(flce.LinearCrossEntropyLoss, error, message, {"in_features": H, "num_classes": V, **arguments})


def test_inplace_of_a_module() -> None:
    refuses(flce.CrossEntropyLoss, TypeError, "inplace must be a bool, got NoneType", {"inplace": None})


@pytest.mark.parametrize(
    "error, message, arguments",
    [
        (ValueError, "num_tokens must be positive, got -1", {"num_tokens": -1}),
        (ValueError, "hidden_size must be positive, got 0", {"hidden_size": 0}),
        (ValueError, "adapter_ranks[1] must be positive, got 0", {"adapter_ranks": (8, 0)}),
        (TypeError, "adapter_ranks must be a sequence of ints, got int", {"adapter_ranks": 8}),
        (ValueError, "reduction must be 'none', 'mean' or 'sum', got 'avg'", {"reduction": "avg"}),
        (TypeError, "options must be None or a flce.ChunkOptions, got dict", {"options": {"chunk_rows": 1}}),
        (ValueError, "device must be a device such as 'cuda' or 'cpu', got 'toaster'", {"device": "toaster"}),
        (ValueError, "accum_dtype must be …got torch.bfloat16 with", {"options": flce.ChunkOptions(accum_dtype=bf16)}),
        (TypeError, "dtype must be a torch.dtype, got 'bfloat16': give torch.bfloat16", {"dtype": "bfloat16"}),
    ],
    ids=str,
)
def test_bad_input_of_plan(error: type[Exception], message: str, arguments: dict[str, Any]) -> None:
    call = {"num_tokens": 8, "hidden_size": 8, "vocab_size": 16, "dtype": f32, "device": "cpu"}
    refuses(flce.plan, error, message, {**call, **arguments})


def test_an_error_leaves_nothing_behind(backend: str) -> None:
    """A valid call after a bad call, on the same tensors, is correct."""
    arguments = good()
    expected = flce.fused_linear_cross_entropy(**arguments)
    assert expected.isfinite()
    with pytest.raises(IndexError):
        flce.fused_linear_cross_entropy(**{**arguments, "target": torch.full((N,), V)})
    assert torch.equal(flce.fused_linear_cross_entropy(**arguments), expected)


def test_a_budget_in_words() -> None:
    assert flce.ChunkOptions(max_workspace_bytes="256MiB") == flce.ChunkOptions(max_workspace_bytes=256 << 20)


def test_a_class_weight_with_a_gradient_where_none_is_made(torch_backend: str) -> None:
    """As in PyTorch, such a weight is valid if gradients are off."""
    with torch.no_grad():
        flce.fused_linear_cross_entropy(**good(weight=torch.ones(V, requires_grad=True)))


@pytest.mark.parametrize("kind", ["head", "logits", "more dimensions"])
def test_the_replacement_that_an_error_names(kind: str) -> None:
    """PyTorch's functions in the message compute the loss of class probabilities, and of a head of more dimensions."""
    input, linear_weight, target = ones(N, H), torch.arange(H * V).view(V, H) / V, torch.eye(V)[:N]
    if kind == "more dimensions":
        linear_weight, target = torch.stack([linear_weight] * 3, 1), indices(N, 3)
    logits = torch.tensordot(input, linear_weight, ([-1], [-1]))
    arguments = (logits,) if kind == "logits" else (input, linear_weight)
    function: Any = flce.cross_entropy if kind == "logits" else flce.fused_linear_cross_entropy
    with pytest.raises((TypeError, ValueError)) as caught:
        function(*arguments, target)
    loss = eval(str(caught.value).split(" use ")[1])
    classes = target if target.is_floating_point() else torch.nn.functional.one_hot(target, V).movedim(-1, 1)
    torch.testing.assert_close(loss, -(classes * logits.log_softmax(1)).sum(1).mean())


def test_values_of_the_debug_variable(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    for value in ("", "0", "1"):
        monkeypatch.setenv("FLCE_DEBUG", value)
        flce.fused_linear_cross_entropy(**good())
    monkeypatch.setenv("FLCE_DEBUG", "foo")
    refuses(flce.fused_linear_cross_entropy, ValueError, "FLCE_DEBUG must be 0 or 1, got 'foo'", good())


def loss_of(x: Tensor, weight: Tensor, target: Tensor) -> Any:
    return flce.fused_linear_cross_entropy(x, weight, target)


def logprobs_of(x: Tensor, weight: Tensor, target: Tensor) -> Any:
    logprob: Any = flce.linear_logprobs(x, weight, target).logprob
    return logprob.sum()


@pytest.mark.parametrize("function", [loss_of, logprobs_of])
def test_transforms(function: Callable[..., Any], torch_backend: str) -> None:
    """Transforms of the operator's tensors raise an error; transforms of other tensors around a call have no effect."""
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
    """Bounds beyond 64 bits act as any sufficiently large bound, without an overflow in the dispatcher."""
    arguments = good(input=good()["input"].requires_grad_())
    expected = flce.fused_linear_cross_entropy(**arguments, options=flce.ChunkOptions(strategy=strategy))
    for bound in (2**63 - 1, 2**63, 2**200):
        for name in ("max_workspace_bytes", "chunk_rows"):
            options = flce.ChunkOptions(strategy=strategy, **{name: bound})  # type: ignore[arg-type]
            loss: Any = flce.fused_linear_cross_entropy(**arguments, options=options)
            torch.testing.assert_close(loss, expected)
            loss.backward()
