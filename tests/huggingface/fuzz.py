"""A fuzzer of lazy logits: random programs, run on a patched model and on the same model as it was.

    python -m tests.huggingface.fuzz --count 50000 --start 0

A program is a few lines of Python that do to logits what users do: views, copies, writes, reads, losses. Its lines
come from the table ``OPERATIONS``. Both models run the same lines; shapes, values, gradients, and whether a line
raises have to agree. A seed that differs is printed as a program from which every line was dropped that the
difference does not need.

Only what users have is called here, nothing of flce's own modules.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import math
import multiprocessing
import pickle
import random
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from types import CodeType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

import flce

WORDS = 9
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# By the coarsest dtype that a program has met.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 0.15, torch.float16: 0.03}

# ----------------------------------------------------------------------------------------------- the operations
#
# What stands in braces is drawn when the line is:
#   x      a tensor of floating-point numbers, of one dimension at least
#   g      the same with two dimensions at least, of which the last has two entries or more: logits
#   o      another tensor of the shape of `x` or `g`, of any of the models
#   y, z   a new name, or now and then one that there is
#   loss   a new name, for something that is differentiated in the end
#   n      a number
#   inf    a number that masks
#   d, e   a dimension; i: an index in dimension `d`; i0: one in the first; p: all dimensions in another order
#   s      a slice; c: an index of a class
#   t      a dtype
# `note` remembers what is not a tensor. The other functions are made in `Run`.

VIEWS = """
{y} = {x}.view(-1, {x}.shape[-1])
{y} = {x}.view({x}.shape)
{y} = {x}.view(-1)
{y} = {x}.view_as({x})
{y} = {x}.reshape(-1, {x}.shape[-1])
{y} = {x}.reshape(-1)
{y} = {x}.flatten(0, -2)
note({g}.flatten(0, -2) is {g})
{y} = {x}.flatten()
{y} = {x}.unflatten(0, (1, -1))
{y} = {x}.transpose({d}, {e})
{y} = {x}.permute({p})
{y} = {g}.mT
{y} = {x}.movedim(-1, 0)
{y} = {x}.unsqueeze({d})
{y} = {x}.squeeze()
{y} = {x}.squeeze({d})
{y} = {x}[None]
{y} = {x}[..., None]
{y} = {x}[{i0}]
{y} = {x}[-1]
{y} = {x}[{s}]
{y} = {x}[{s}]
{y} = {g}[:, {s}]
{y} = {x}[..., {s}]
{y} = {x}[..., {c}]
{y} = {x}[..., {c}:{c} + 1]
{y} = {g}[..., :-1, :]
{y} = {g}[:, -1]
{y} = {g}[..., -1, :]
{y} = {x}[...]
{y} = {x}[:]
{y} = {x}.narrow({d}, {i}, 1)
{y} = {x}.select({d}, {i})
{y} = {x}.unbind({d})[{i}]
{y}, {z} = {x}.tensor_split(2, {d})
{y} = {x}.split(2, {d})[-1]
{y}, {z} = {x}.split([1, {x}.shape[{d}] - 1], {d})
{y} = {x}.chunk(2, {d})[0]
{y} = {x}.expand(2, *{x}.shape)
{y} = {x}.swapaxes({d}, {e})
{y} = {g}.diagonal(dim1=-2, dim2=-1)
{y} = next(iter({x}))
{y} = [row for row in {x}][-1]
"""

COPIES = """
{y} = {x}.detach()
{y} = {x}.detach()
{y} = {x}.data
{y} = {x}.clone()
{y} = {x}.clone()
{y} = {x}.detach().clone()
{y} = {x}.contiguous()
{y} = {x}.float()
{y} = {x}.double()
{y} = {x}.to({t})
{y} = {x}.to({x}.dtype)
{y} = {x}.to({x}.dtype, copy=True)
{y} = {x}.type_as(noise(1))
{y} = {x}.to('cpu')
{y} = {x}.cpu()
{y} = {x}[bits({x}.shape[:-1])]
{y} = {x}[bits({x}.shape)]
{y} = {x}[bits({x}.shape[:1])]
{y} = {x}[[0, -1]]
{y} = {x}[index({x}, 0)]
{y} = {x}[..., index({x}, -1)]
{y} = {g}[:, index({g}, 1)]
{y} = {g}[:, -1, [0, -1]]
{y} = {x}.index_select({d}, index({x}, {d}))
{y} = {x}.repeat(2, *[1] * ({x}.ndim - 1))
{y} = {x}.repeat_interleave(2, {d})
{y} = {x}.flip({d})
{y} = {x}.roll(1, {d})
{y} = copy.deepcopy({x}.detach())
{y} = copy.copy({x})
{y} = {x}.as_subclass(torch.Tensor)
{y} = pickle.loads(pickle.dumps({x}.detach()))
{y} = torch.tensor({x}.tolist(), dtype={x}.dtype)
{y} = torch.empty_like({x}).copy_({x})
{y} = torch.zeros_like({x})
{y} = {x}.new_zeros({x}.shape)
{y} = {x}.masked_select(bits({x}.shape))
"""

ARITHMETIC = """
{y} = {x} * {n}
{y} = {n} * {x}
{y} = {x} / {n}
{y} = {x} + {n}
{y} = {x} - {n}
{y} = {n} - {x}
{y} = -{x}
{y} = {x} * scalar({n})
{y} = {x} / scalar({n})
{y} = {x} + noise({x}.shape[-1:])
{y} = {x} * noise({x}.shape[-1:])
{y} = {x} + noise({x}.shape[:-1]).unsqueeze(-1)
{y} = {x} * noise({x}.shape[:-1]).unsqueeze(-1)
{y} = {x} + noise({x}.shape)
{y} = {x} + {o}
{y} = {x} - {o}
{y} = {x} * {o}
{y} = {x} + {x}
{y} = torch.add({x}, {o}, alpha=2)
{y} = torch.lerp({x}, {o}, 0.3)
{y} = torch.tanh({x} / {n}) * {n}
{y} = {x}.tanh()
{y} = {x}.sigmoid()
{y} = {x}.relu()
{y} = {x}.abs()
{y} = {x} ** 2
{y} = {x}.clamp(-0.5, 0.5)
{y} = {x}.nan_to_num(0.5, 2.0, -2.0)
{y} = {x}.masked_fill(bits({x}.shape[-1:]), {inf})
{y} = {x}.masked_fill(torch.arange({x}.shape[-1]) < 4, {inf})
{y} = {x}.masked_fill(bits({x}.shape[:-1]).unsqueeze(-1), {inf})
{y} = {x}.masked_fill(bits({x}.shape), {inf})
{y} = torch.where(bits({x}.shape), {x}, {n})
{y} = torch.where(bits({x}.shape[:-1]).unsqueeze(-1), {x}, {o})
{y} = torch.where(bits({x}.shape[-1:]), {x}, {inf})
{y} = torch.where({x} > 0, {x}, 0.0)
{y} = {x}.log_softmax(-1)
{y} = {x}.log_softmax(-1)
{y} = {x}.log_softmax(-1).clone()
{y} = {x}.log_softmax(-1)[bits({x}.shape[:-1])]
{y} = F.log_softmax({x}, -1)
{y} = F.log_softmax({x}, -1)
{y} = F.log_softmax({x}, dim=-1, dtype=torch.float64)
{y} = {x}.log_softmax({d})
{y} = {x}.softmax(-1)
{y} = {x}.softmax({d})
{y} = {x}.cumsum({d})
{y} = {x}.index_fill(-1, index({x}, -1), {inf})
{y} = {x}.scatter(-1, chosen({x}), {n})
{y} = {g} @ noise(({g}.shape[-1], 2))
{y} = F.pad({x}, (0, 1))
{y} = torch.einsum('...v,...v->...', {x}, {o})
"""

REDUCTIONS = """
{y} = {x}.sum()
{y} = {x}.sum(-1)
{y} = {x}.sum({d}, keepdim=True)
{y} = {x}.mean()
{y} = {x}.mean({d})
{y} = {x}.mean(-1)
{y} = {x}.logsumexp(-1)
{y} = {x}.logsumexp({d})
{y} = {x}.argmax(-1)
{y} = {x}.argmax({d})
{y} = {x}.amax(-1)
{y} = {x}.max(-1).values
{y} = {x}.max(-1)[1]
{y} = {x}.max()
{y} = {x}.min()
{y} = {x}.topk(1).values
{y} = {x}.sort(-1).values
{y} = {x}.gather(-1, chosen({x}))
{y} = {x}.gather(-1, chosen({x})).squeeze(-1)
{y} = {x}.log_softmax(-1).gather(-1, chosen({x})).squeeze(-1)
{y} = {x}.take_along_dim(chosen({x}), -1)
{y} = torch.take_along_dim({x}.log_softmax(-1), chosen({x})[:1], -1)
{y} = {g}.mT.take_along_dim(chosen({g}).mT, -2)
{y} = {x}.isnan()
{y} = {x} > 0
{y} = {x} == {x}
{y} = {x}.isnan().any()
{y} = {x}.square().mean()
{y} = {x}.norm()
{y} = {x}.var(-1)
"""

TOGETHER = """
{y} = torch.cat([{x}, {o}], {d})
{y} = torch.cat([{x}, {o}], -1)
{y} = torch.cat([{x}, {o}])
{y} = torch.cat([{x}[:1], {o}])
{y} = torch.cat([{x}[..., :1], {o}], -1)
{y} = torch.cat([{x}, noise({x}.shape)])
{y} = torch.cat([{x}, noise({x}.shape)], -1)
{y} = torch.cat([{x}])
{y} = torch.stack([{x}, {o}])
{y} = torch.stack([{x}, {o}])
{y} = torch.stack([{x}, {o}], -1)
{y} = torch.stack([{x}, {o}], {d})
{y} = torch.stack([{x}, {o}])[0]
{y} = torch.stack([{x}, {o}])[1:]
{y}, {z} = torch.stack([{x}, {o}]).unbind()
{y}, {z} = torch.stack([{x}, {o}], -1).unbind(-1)
{y} = torch.stack([{x}, {o}]).select(0, 1)
{y} = torch.stack([{x}, {o}]).mean(0)
{y} = torch.stack([{x}, noise({x}.shape)])
{y} = torch.stack(list({x}))
{y} = torch.stack([torch.stack([{x}, {o}]), torch.stack([{o}, {x}])])[0, 1]
{y} = torch.cat([{x}, {o}]).view(2, *{x}.shape)
{y} = torch.cat([{x}, {o}])[{x}.shape[0]:]
"""

HEADS = """
{y} = b(ids)
{y} = b(ids)
{y} = a(ids.flip(0))
{y} = a(ids)
"""

# What programs do to the models between their call and the loss.
MODELS = """
requires_grad(False, 'head')
requires_grad(False, 'head')
requires_grad(False)
requires_grad(True)
adapter(False)
adapter(True)
rescale_hidden({n})
rescale_hidden_data({n})
"""

WRITES = """
{x}[0] = {n}
{x}[-1] = {inf}
{x}[{s}] = {n}
{x}[..., {c}] = {n}
{x}[..., {c}] = noise({x}.shape[:-1])
{x}[..., [0, -1]] = {inf}
{x}[..., {c}:] = {inf}
{x}[..., bits({x}.shape[-1:])] = {inf}
{x}[bits({x}.shape)] = {inf}
{x}[bits({x}.shape[:-1])] = {n}
{x}[{x} < 0] = {n}
{x}[0] = {o}[-1]
{x}[{s}] = noise({x}[{s}].shape)
{x}[:] = {o}
{x}[...] = {n}
{x}[{s}] *= {n}
{x}[..., {c}] += {n}
{x}[{i0}] += {o}[{i0}]
{x}[:-1] = {x}[1:].clone()
{x}[{x} < {x}.topk(1).values] = {inf}
note({x}.mul_({n}) is {x})
{y} = {x}.mul_({n})
{y} = {x}.mul_({n})
{y} = {x}.tanh()[..., index({x}, -1)].mul_({n})
{y} = {x}.gather(-1, chosen({x})).mul_({n})
{y} = {x}.tanh().gather(-1, chosen({x})).mul_({n})
{y} = {g}.log_softmax(-1)[:, -1, [0, -1]].mul_({n})
{x}.mul_(noise({x}.shape[-1:]))
{y} = {x}.div_({n})
{x}.div_({n})
{y} = {x}.add_({n})
{x}.add_({o})
{y} = {x}.add_(noise({x}.shape[-1:]))
{x}.sub_({n})
{x}.sub_({o})
{y} = {x}.neg_()
{y} = {x}.tanh_()
note({x}.tanh_() is {x})
{x}.zero_()
{x}.zero_()
{x}.fill_({n})
{y} = {x}.masked_fill_(bits({x}.shape[-1:]), {inf})
{x}.masked_fill_(bits({x}.shape[:-1]).unsqueeze(-1), {inf})
{x}.masked_fill_(bits({x}.shape), {inf})
{x}.copy_({o})
{x}.copy_({o})
{x}.copy_(noise({x}.shape))
{y} = {x}.clamp_(-0.5, 0.5)
{x}.index_fill_(-1, index({x}, -1), {inf})
{x}.index_copy_(0, index({x}, 0)[:1], noise({x}[:1].shape))
{x}.scatter_(-1, chosen({x}), {n})
{x}.scatter_add_(-1, chosen({x}), noise(chosen({x}).shape))
{x}.addcmul_({o}, {o})
{x}.relu_()
{x}.exp_()
{x} *= {n}
{x} /= {n}
{x} += {o}
{x} += {n}
{x} -= noise({x}.shape[-1:])
{x} *= scalar({n})
{x}.data.mul_({n})
{x}.detach().mul_({n})
{x}.detach()[0] = {n}
"""

# Rare: other names for the same memory, and logits whose shape is changed in place.
RARE = """
{x}.data = noise({x}.shape)
torch.mul({x}.detach(), {n}, out={x}.detach())
{x}.detach().numpy().fill({n})
{y} = F.dropout({x}, 0.5, training=False)
{y} = functools.reduce(lambda x, _: x * 1.01, range(500), {x})
{y} = noise(1); torch.utils.swap_tensors({y}, {x}.detach())
{y} = torch.utils.checkpoint.checkpoint(lambda part: part.tanh() * 2, {x}, use_reentrant=False)
"""

READS = """
note({x}.isnan().any().item())
note({x}.isnan().any().item())
note({x}.sum().item())
note({x}.detach().sum().item())
note({x}.tolist())
note({x}.detach().numpy())
note(np.asarray({x}.detach()))
note({x}.detach().cpu().float().numpy())
note({x}.max().item())
note({x}.argmax(-1).tolist())
note(bool(({x} > 0).any()))
note(len({x}))
note([row.sum().item() for row in {x}])
note(torch.allclose({x}, {o}.to({x}.dtype), equal_nan=True))
note(torch.allclose({x}, {x}))
note({x}.isclose({o}.to({x}.dtype)).sum().item())
note({x}.shape, {x}.size(-1), {x}.ndim, {x}.numel(), {x}.dtype, {x}.nbytes)
note({x}.is_floating_point(), torch.is_tensor({x}), isinstance({x}, torch.Tensor), {x}.layout, {x}.is_sparse)
note({x}[..., 0].flatten()[0].item())
note({x}.grad_fn is None)
note(tangent({x}))
note(repr({x}.isfinite()))
"""

LOSSES = """
{loss} = F.cross_entropy({g}.reshape(-1, {g}.shape[-1]), labels({g}).reshape(-1))
{loss} = F.cross_entropy({g}.view(-1, {g}.shape[-1]), labels({g}).view(-1))
{loss} = F.cross_entropy({g}.flatten(0, -2).float(), labels({g}).flatten())
{loss} = F.cross_entropy({g}.flatten(0, -2), labels({g}).flatten(), reduction='sum')
{loss} = F.cross_entropy({g}.flatten(0, -2), labels({g}).flatten(), reduction='none')
{loss} = F.cross_entropy({g}.flatten(0, -2), labels({g}).flatten(), ignore_index=3)
{loss} = F.cross_entropy({g}.flatten(0, -2), labels({g}).flatten(), label_smoothing=0.1)
{loss} = F.cross_entropy({g}.flatten(0, -2), labels({g}).flatten(), weight=noise({g}.shape[-1:]).abs())
{loss} = nn.CrossEntropyLoss()({g}.flatten(0, -2), labels({g}).flatten())
{loss} = F.cross_entropy({g}.movedim(-1, 1), labels({g}))
{loss} = F.cross_entropy({g}.transpose(1, -1), labels({g}.transpose(1, -1).movedim(1, -1)), reduction='sum')
{loss} = F.cross_entropy({g}[:, :-1].flatten(0, -2), labels({g}[:, :-1]).flatten())
{loss} = F.cross_entropy({g}[:, :-1, :].contiguous().view(-1, {g}.shape[-1]), labels({g}[:, :-1]).view(-1))
{loss} = F.cross_entropy({g}, labels({g}))
{loss} = F.cross_entropy({g}.flatten(0, -2), noise({g}.shape).softmax(-1).flatten(0, -2))
{loss} = F.nll_loss({g}.log_softmax(-1).flatten(0, -2), labels({g}).flatten())
{loss} = F.nll_loss(F.log_softmax({g}, -1).view(-1, {g}.shape[-1]), labels({g}).view(-1), reduction='sum')
{loss} = F.nll_loss({g}.flatten(0, -2), labels({g}).flatten())
{loss} = -{g}.log_softmax(-1).gather(-1, chosen({g})).mean()
{loss} = ({g}.logsumexp(-1) - {g}.gather(-1, chosen({g})).squeeze(-1)).mean()
{loss} = {g}.logsumexp(-1).square().mean()
{loss} = F.kl_div({g}.log_softmax(-1), {o}.softmax(-1), reduction='batchmean')
{loss} = F.kl_div({g}.log_softmax(-1), {o}.log_softmax(-1), log_target=True)
{loss} = -({g}.softmax(-1) * {g}.log_softmax(-1)).sum(-1).mean()
{loss} = F.mse_loss({g}, {o})
{loss} = -F.logsigmoid(picked({g}).sum() - picked({o}).sum())
{loss} = {g}.log_softmax(-1).sum()
{loss} = {x}.sum()
"""

AUTOGRAD = """
{y} = Doubled.apply({x})
{y} = Squared.apply({x})
{y} = DoubledInPlace.apply({x})
{y} = TripledInPlace.apply({x})
note(DoubledInPlace.apply({x}) is {x})
hook({x}, keep('{x}'))
hook({x}, keep('{x}'))
hook({x}, lambda gradient: gradient * 2)
retain({x})
{y} = {x}.detach().requires_grad_(); retain({y})
note({x}.requires_grad_() is {x})
del {x}
"""

GROUPS = {
    "views": VIEWS,
    "copies": COPIES,
    "arithmetic": ARITHMETIC,
    "reductions": REDUCTIONS,
    "together": TOGETHER,
    "heads": HEADS,
    "models": MODELS,
    "writes": WRITES,
    "rare": RARE,
    "reads": READS,
    "losses": LOSSES,
    "autograd": AUTOGRAD,
}
OPERATIONS: dict[str, list[str]] = {name: text.strip().splitlines() for name, text in GROUPS.items()}
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
    "autograd": 5,
}

NUMBERS = ["0.5", "2", "-1.5", "3.0", "0.25"]
MASKS = ["float('-inf')", "float('-inf')", "-1e4", "3.0", "0.0"]
SLICES = ["1:", ":-1", "::2", "-1:", ":1", "1:2"]
FILLED = torch.tensor([float(n) for n in NUMBERS] + [-1e4, 3.0], dtype=torch.float64)
# Of numbers that are rounded coarsely these depend on the rounding.
DISCRETE = re.compile(r"arg|topk|max|min\(|sort|[<>] |==|equal|relu|clamp|> 0")


# ------------------------------------------------------------------------------------------------- the programs


@dataclass(frozen=True)
class Setup:
    """The models and how they are called."""

    dtype: str = "float64"
    bias: bool = True
    shape: tuple[int, ...] = (2, 4)
    max_workspace_bytes: int | None = None
    head: tuple[int, int] = (13, 5)  # classes, and the hidden size
    frozen: str = ""  # the name of a parameter
    tied: bool = False
    adapter: bool = False  # on the head
    mode: str = "train"  # or "labels": an evaluation with labels; "no_grad": the same without gradients

    def __str__(self) -> str:
        plain = Setup()
        told = [f"{k}={v!r}" for k, v in self.__dict__.items() if v != getattr(plain, k)]
        return f"Setup({', '.join(told)})"


@dataclass(frozen=True)
class Program:
    setup: Setup
    steps: tuple[str, ...]
    roots: tuple[str, ...]  # what is differentiated
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
    """A linear layer with an adapter beside it, as PEFT's."""

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
    """The least that is a language model."""

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
        return gradients[0] * 3  # not the right one: it shows that it was called


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


def hook(x: Tensor, function: Callable[[Tensor], Any]) -> None:
    _ = x.grad_fn  # see `Run.crashes`
    x.register_hook(function)


def total(x: Tensor) -> Tensor:
    """The number that is differentiated: of finite entries, each with a weight of its own."""
    if x.ndim == 0:
        return x.double()
    weights = _drawn(tuple(x.shape), 11, "float64").to(x.dtype)
    return (x.nan_to_num(0.0, 0.0, 0.0) * weights).sum().double()


@functools.lru_cache(maxsize=4096)
def compiled(step: str) -> CodeType:
    return compile(step, "<step>", "exec")


class Run:
    """A program on one of the models, line by line."""

    def __init__(self, setup: Setup, patched: bool, wrong: Callable[[str], str] | None = None) -> None:
        self.setup, self.patched, self.wrong = setup, patched, wrong
        self.notes: list[tuple[str, Any]] = []
        self.code = ""
        self.hooked: list[tuple[str, Tensor]] = []
        self.retained: list[Tensor] = []
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
            "requires_grad": self._requires_grad,
            "adapter": self._adapter,
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
        with torch.set_grad_enabled(self.setup.mode != "no_grad" and torch.is_grad_enabled()):
            logits: Tensor = self._model(name)(ids, **given)
        return logits

    def _each(self, change: Callable[[Head], Any]) -> None:
        for model in self.models.values():
            change(model)

    def _requires_grad(self, wanted: bool, part: str = "") -> None:
        """Freeze some parameters, or let those be trained again that were."""
        for model in self.models.values():
            for name, parameter in model.named_parameters():
                if name in model.trained and name.startswith(part):
                    parameter.requires_grad_(wanted)

    def _adapter(self, enabled: bool) -> None:
        """As PEFT enables and disables one: its parameters are frozen meanwhile."""
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

    def step(self, code: str) -> None:
        if self.wrong is not None:
            code = self.wrong(code)
        self.code = code
        exec(compiled(code), self.globals, self.tensors)

    def watch(self, step: str) -> None:
        """After a line: count what is written to tensors by methods of their own."""
        for name in _names(step):
            x = self.tensors.get(name)
            if x is None or name in _made(step):
                self.written[name] = 0
            elif re.search(rf"\b{name}(\.\w+_\(| [-+*/]= )", step):
                self.written[name] += 1

    def crashes(self, step: str) -> bool:
        """Whether PyTorch 2.13 may: in a hook on a tensor that was written to through a view, unless something has
        asked for the tensor's `grad_fn` since."""
        if not HOOKS.search(step):
            return False
        return any(n in self.tensors and self.tensors[n]._version != self.written[n] for n in _names(step))

    def backward(self, roots: Sequence[str]) -> None:
        sums = [total(self.tensors[name]) for name in roots]
        if sums:
            torch.stack(sums).sum().backward()

    def gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        for letter, model in self.models.items():
            for name, parameter in model.named_parameters():
                yield f"gradient of {letter}.{name}", parameter.grad
        for x in self.retained:
            yield "retained gradient", x.grad
        hooked = sorted(self.hooked, key=itemgetter(0))  # of two tensors either may be the first
        yield f"calls of hooks: {[name for name, _ in hooked]}", None
        yield from ((f"gradient in the hook of {name}", gradient) for name, gradient in hooked)

    def read(self) -> Iterator[tuple[str, Any]]:
        """The notes and the values of all tensors."""
        for code, what in self.notes:
            yield f"`{code}`", what
        for name, x in self.tensors.items():
            yield name, _result(lambda x=x: x.tolist())  # type: ignore[misc]

    def parameters_changed(self) -> bool:
        return not all(
            torch.equal(before, now)
            for name, model in self.models.items()
            for before, now in zip(self.before[name], model.parameters(), strict=True)
        )


def bits(shape: Sequence[int]) -> Tensor:
    """A mask. It does not take the first class from all tokens."""
    mask = _drawn(tuple(shape), 5, "float64") > 0.4
    if mask.ndim:
        mask[..., 0] &= not mask[..., 0].all()
    return mask


def index(x: Tensor, dim: int) -> Tensor:
    """The last index of a dimension, and the first."""
    size = x.shape[dim]
    return torch.tensor([size - 1, 0])[: max(size, 1)]


def labels(x: Tensor) -> Tensor:
    """A class for each token; one token in a few is ignored."""
    rows = math.prod(x.shape[:-1])
    flat = torch.arange(rows).mul(7).add(3).remainder(x.shape[-1])
    flat[2::5] = -100
    return flat.view(x.shape[:-1])


def chosen(x: Tensor) -> Tensor:
    """For `gather`: a class for each token."""
    return labels(x).clamp_min(0).unsqueeze(-1)


def tangent(x: Tensor) -> float:
    """Of a sum, in the direction of a factor."""
    with forward_ad.dual_level():
        factor = forward_ad.make_dual(torch.tensor(2.0, dtype=x.dtype), torch.tensor(1.0, dtype=x.dtype))
        return float(forward_ad.unpack_dual((x * factor).tanh().sum()).tangent)


def picked(x: Tensor) -> Tensor:
    return x.log_softmax(-1).gather(-1, chosen(x)).squeeze(-1)


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
    "picked": picked,
    "tangent": tangent,
    "functools": functools,
}

# ---------------------------------------------------------------------------------------------------- comparing


def _same(got: Any, want: Any, tolerance: float) -> str | None:
    """What differs between two nests of lists, numbers and arrays."""
    if isinstance(want, Tensor):
        if not isinstance(got, Tensor):
            return f"{type(got).__name__} instead of a tensor"
        if (got.shape, got.dtype) != (want.shape, want.dtype):
            return f"{tuple(got.shape)} {got.dtype} instead of {tuple(want.shape)} {want.dtype}"
        got, want = got.detach().double().numpy(), want.detach().double().numpy()
    if isinstance(want, Exception):
        return None  # a view that may not be looked at any more
    if isinstance(want, bool | str | torch.dtype | torch.layout | torch.Size | type(None)):
        return None if type(got) is type(want) and got == want else f"{got} instead of {want}"
    if isinstance(got, Exception):
        return None if STALE.search(str(got)) else _told(got)
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


def _properties(x: Any, layout: bool) -> dict[str, Any]:
    told = {"type": isinstance(x, Tensor), "shape": tuple(x.shape), "dtype": x.dtype, "requires_grad": x.requires_grad}
    return {**told, "strides": x.stride(), "contiguity": x.is_contiguous()} if layout else told


# Documented: after the loss no gradient passes through lazy logits, and who asks for one is told.
HOOKS = re.compile(r"hook\(|retain\(")
TOLD = "after the loss"
# What autograd forbids, because it cannot do it for views in one memory.
VIEW_RULES = re.compile(r"created in no_grad mode|output of a function that returns multiple views|a leaf Variable")
# Writes that autograd does not see: stock's gradients are then those of another value.
UNSEEN = re.compile(r"\.data\b|numpy\(\)\.fill|hidden_data\(")
# Documented: an error where hidden states have changed that are still needed; PyTorch's own for some views of them.
STALE = re.compile(
    r"no longer be computed: the hidden states were changed|its base or another view of its base has been"
)
# A write, and the name that it goes by; what C++ code is given.
WRITE = re.compile(
    r"\b(\w+)(?:\[.*\]|\.\w+\(\))*(?:\.[a-z]\w*_\(| [-+*/]= |\[.*\] = )|InPlace\.apply\((\w+)\)|out=(\w+)"
)
GIVEN = re.compile(r"\.apply\((\w+)\)|checkpoint\(.*, (\w+), ")


def _beyond(steps: Sequence[str], loose: set[str]) -> bool:
    """Whether gradients are of no use: limits of flce (docs/support.md), or of PyTorch.

    flce: autograd.Functions and checkpoints of logits that were read, and then written to through a view of them, or
    for which somebody asked for a gradient later. PyTorch: whether a hook is called that was set before a tensor was
    changed in place depends on whether that is a view.
    """
    written: set[str] = set()
    given: set[str] = set()
    hooked: set[str] = set()
    for step in steps:
        now = {name for names in GIVEN.findall(step) for name in names if name}
        writes = {name for names in WRITE.findall(step) for name in names if name}
        if re.search(r"detach\(\)\.\w+_\(", step):
            writes.add("a view")
        if HOOKS.search(step):
            hooked.update(_names(step))
        if (now and written - now) or (hooked and writes) or hooked & given or (loose and "InPlace" in step):
            return True
        given |= now
        written |= writes
    return False


def _fails(action: Callable[[], Any]) -> Exception | None:
    try:
        action()
    except Exception as error:
        return error
    return None


def _told(error: Exception | None) -> str:
    return "nothing" if error is None else f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _result(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as error:
        return error


def compare(program: Program, wrong: Callable[[str], str] | None = None, layout: bool = False) -> Difference | None:
    """Run a program on both models.

    Args:
        program: what to run.
        wrong: changes each line for the patched model. For a test that differences are found.
        layout: whether strides have to agree too, and that views are refused where autograd refuses them.

    Returns:
        The first difference, if there is one.
    """
    stock, lazy = Run(program.setup, False), Run(program.setup, True, wrong)
    # PyTorch says of views that were made without gradients that they require some, and gives them none.
    loose: set[str] = set()
    for step in program.steps:
        if stock.crashes(step):
            continue
        want, got = _fails(lambda step=step: stock.step(step)), _fails(lambda step=step: lazy.step(step))  # type: ignore[misc]
        if (want is None) != (got is None):
            if STALE.search(str(got)) and any("rescale_hidden" in before for before in program.steps):
                return None
            if want is None and HOOKS.search(step) and (TOLD in str(got) or loose.intersection(_names(step))):
                return None
            if (VIEW_RULES.search(str(want)) and not layout) or "max_workspace_bytes" in str(got):
                return None
            kind = "patched raises" if want is None else "stock raises"
            return Difference(kind, f"at `{step}`: {_told(got if want is None else want)}")
        if want is not None:
            return None
        stock.watch(step)
        made = set(_made(step))
        taken = _names(step.split(" = ")[-1])
        if ".requires_grad_()" in step:  # views of a leaf follow it, but not views of what was a view itself
            loose |= set(stock.tensors)
        elif "no_grad" in step or loose.intersection(taken):
            loose |= made
        else:
            loose -= made
        for name in _names(step):
            if name not in stock.tensors:
                continue
            theirs = _result(lambda name=name: _properties(stock.tensors[name], layout))  # type: ignore[misc]
            if isinstance(theirs, Exception):
                continue
            ours = _result(lambda name=name: _properties(lazy.tensors[name], layout))  # type: ignore[misc]
            if STALE.search(str(ours)):
                return None
            if isinstance(ours, Exception):
                return Difference("properties raise", f"{name} after `{step}`: {_told(ours)}")
            for what in theirs:
                if ours[what] != theirs[what] and not (what == "requires_grad" and name in loose):
                    return Difference(what, f"{name} after `{step}`: {ours[what]} instead of {theirs[what]}")
    tolerance = max(
        [TOLERANCE[DTYPES[program.setup.dtype]]]
        + [TOLERANCE.get(x.dtype, 0.0) for x in stock.tensors.values()]
        + [TOLERANCE[dtype] for name, dtype in DTYPES.items() if any(name in step for step in program.steps)]
        + [TOLERANCE[torch.float32] for step in program.steps if ".float()" in step]
    )
    reads = [_values, _gradients] if program.read_first else [_gradients, _values]
    for read in reads:
        difference = read(program, stock, lazy, tolerance, loose)
        if difference is not None:
            return difference
    if lazy.parameters_changed():
        return Difference("parameters", "a parameter was written to")
    return None


def _values(program: Program, stock: Run, lazy: Run, tolerance: float, loose: set[str]) -> Difference | None:
    for (name, want), (_, got) in zip(stock.read(), lazy.read(), strict=True):
        difference = _same(got, want, tolerance)
        if difference is not None and not ("InPlace.apply" in name and loose):
            return Difference("note" if "note" in name else "value", f"{name}: {difference}")
    return None


def _gradients(program: Program, stock: Run, lazy: Run, tolerance: float, loose: set[str]) -> Difference | None:
    want, got = _fails(lambda: stock.backward(program.roots)), _fails(lambda: lazy.backward(program.roots))
    if want is not None or any(map(UNSEEN.search, program.steps)) or _beyond(program.steps, loose):
        return None  # stock cannot differentiate this; it is no harm if flce can
    if got is not None:
        told = _told(got)
        # Documented: a checkpoint in which logits stayed lazy, and that were read between it and backward.
        allowed = ("does not require grad" in told and loose) or told.startswith("CheckpointError")
        return None if allowed or STALE.search(told) else Difference("backward raises", told)
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
    """There is nothing to draw here."""


class Draw:
    """Fills in the braces of an operation, which it reads as a mapping."""

    def __init__(self, rng: random.Random, tensors: dict[str, Any], fresh: Iterator[int]) -> None:
        self.rng, self.tensors, self.fresh = rng, tensors, fresh
        self.drawn: dict[str, str] = {}

    def __getitem__(self, key: str) -> str:
        if key not in self.drawn:
            self.drawn[key] = getattr(self, f"_{key}")()
        return self.drawn[key]

    def _pick(self, suits: Callable[[Tensor], bool]) -> str:
        names = [n for n, x in self.tensors.items() if x.is_floating_point() and x.ndim and x.numel() and suits(x)]
        if not names:
            raise Unsuitable
        # Chains are what goes wrong: most lines take up what the last one made, or the model's logits.
        return self.rng.choices([names[-1], names[0], self.rng.choice(names)], [40, 25, 35])[0]

    def _main(self) -> Tensor:
        name = self.drawn.get("x") or self.drawn.get("g")
        x: Tensor = self.tensors[name if name is not None else self["x"]]
        return x

    def operands(self) -> list[Tensor]:
        return [self.tensors[self.drawn[key]] for key in "xgo" if key in self.drawn]

    def _x(self) -> str:
        return self._pick(lambda x: x.numel() < 1500 and x.ndim < 6)

    def _g(self) -> str:
        return self._pick(lambda x: x.ndim > 1 and x.shape[-1] > 1 and x.numel() < 1500)

    def _o(self) -> str:
        main = self._main()
        name = self.drawn.get("x") or self.drawn.get("g")
        if self.rng.random() < 0.1:
            return str(name)
        return self._pick(lambda x: x is not main and x.shape == main.shape)

    def _new(self, letter: str) -> str:
        if self.rng.random() < 0.12:
            return self.rng.choice([n for n in self.tensors if not n.startswith("loss")] or ["lg"])
        return f"{letter}{next(self.fresh)}"

    def _y(self) -> str:
        return self._new("t")

    def _z(self) -> str:
        return f"t{next(self.fresh)}"

    def _loss(self) -> str:
        return f"loss{next(self.fresh)}"

    def _n(self) -> str:
        return self.rng.choice(NUMBERS)

    def _inf(self) -> str:
        return self.rng.choice(MASKS)

    def _d(self) -> str:
        ndim = self._main().ndim
        return str(self.rng.randrange(-ndim, ndim))

    _e = _d

    def _i(self) -> str:
        return str(self.rng.randrange(self._main().shape[int(self["d"])]))

    def _i0(self) -> str:
        return str(self.rng.randrange(self._main().shape[0]))

    def _c(self) -> str:
        return str(self.rng.randrange(self._main().shape[-1]))

    def _p(self) -> str:
        order = list(range(self._main().ndim))
        self.rng.shuffle(order)
        return ", ".join(map(str, order))

    def _s(self) -> str:
        return self.rng.choice(SLICES)

    def _t(self) -> str:
        return "torch." + self.rng.choice(["float64", "float64", "float32", "bfloat16"])


def _draw_setup(rng: random.Random) -> Setup:
    bias = rng.random() < 0.5
    names = ["embedding.weight", "trunk", "head.weight"] + (["head.bias"] if bias else [])
    tied = rng.random() < 0.05
    return Setup(
        dtype=rng.choices(["float64", "float32", "bfloat16"], [90, 7, 3])[0],
        bias=bias,
        shape=rng.choices([(2, 4), (8,), (3, 1), (1, 5), (2, 2, 2)], [70, 10, 5, 10, 5])[0],
        max_workspace_bytes=rng.choice([None, 3000]),
        head=(13, 5) if tied else rng.choices([(13, 5), (5, 5), (13, 1), (5, 1), (1, 5)], [80, 8, 5, 4, 3])[0],
        frozen=rng.choice(names) if not tied and rng.random() < 0.15 else "",
        tied=tied,
        adapter=rng.random() < 0.2,
        mode=rng.choices(["train", "labels", "no_grad"], [85, 10, 5])[0],
    )


def _has_ties(x: Any) -> bool:
    """Whether rounding decides which of two entries is the larger, or whether one is above zero."""
    numbers = x.detach().double().flatten()
    numbers = numbers[numbers.isfinite()].sort().values
    rounded = (numbers.diff().abs() < 1e-6) | (numbers[1:].abs() < 1e-6)
    return bool((rounded & ~torch.isin(numbers[1:], FILLED)).any())


def _differentiable(x: Tensor) -> bool:
    return x.grad_fn is not None and (x.ndim > 0 or bool(x.isfinite()))


def draw(seed: int) -> Program:
    """The program of a seed. Stock's model runs it meanwhile, so that its lines fit the tensors."""
    rng = random.Random(seed)
    setup = _draw_setup(rng)
    run = Run(setup, patched=False)
    steps: list[str] = []
    fresh = iter(range(1, 1000))
    length = rng.randint(2, 10)
    groups, weights = list(WEIGHTS), list(WEIGHTS.values())
    for _ in range(4 * length):
        if len(steps) == length:
            break
        template = rng.choice(OPERATIONS[rng.choices(groups, weights)[0]])
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
        elif template in OPERATIONS["reads"] and rng.random() < 0.1:
            step = f"with torch.inference_mode(): {step}"
        error = _fails(lambda step=step: run.step(step))  # type: ignore[misc]
        if error is None:
            steps.append(step)
        elif rng.random() < 0.1:
            steps.append(step)
            break
        if not all(isinstance(x, Tensor) for x in run.tensors.values()):
            raise TypeError(f"seed {seed}: `{step}` made something that is no tensor")
    roots = [
        name
        for name, x in run.tensors.items()
        if rng.random() < (0.9 if name.startswith("loss") else 0.35) and _result(lambda x=x: _differentiable(x)) is True  # type: ignore[misc]
    ]
    return Program(setup, tuple(steps), tuple(roots), rng.random() < 0.5)


def _names(step: str) -> list[str]:
    """The tensors of a line, in the order in which they appear."""
    return list(dict.fromkeys(re.findall(r"\b(?:lg|t\d+|loss\d+)\b", step)))


def _made(step: str) -> list[str]:
    """Those that it gives to names, or takes away."""
    return [n for n in _names(step) if re.match(rf"(.*: )?(\w+, )?{n}(, \w+)? = |del {n}", step)]


def _without(program: Program, position: int) -> Iterator[Program]:
    """Programs without one line, in which what the line made is something else."""
    step = program.steps[position]
    rest = program.steps[:position] + program.steps[position + 1 :]
    made = _made(step)
    used = [n for n in _names(step) if n not in made] or ["lg"]
    yield replace(program, steps=rest, roots=tuple(r for r in program.roots if r not in made))
    for old in made:
        after = tuple(re.sub(rf"\b{old}\b", used[0], s) for s in program.steps[position + 1 :])
        roots = tuple(dict.fromkeys(used[0] if r == old else r for r in program.roots))
        yield replace(program, steps=program.steps[:position] + after, roots=roots)


def _simpler(program: Program) -> Iterator[Program]:
    for position in reversed(range(len(program.steps))):
        yield from _without(program, position)
    for root in program.roots:
        yield replace(program, roots=tuple(r for r in program.roots if r != root))
    for name, value in Setup().__dict__.items():
        if getattr(program.setup, name) != value:
            yield replace(program, setup=replace(program.setup, **{name: value}))
    if program.setup.bias:
        yield replace(program, setup=replace(program.setup, bias=False))
    for position, step in enumerate(program.steps):
        plainer = [re.sub(r"^with .*?: ", "", step)]
        plainer += [re.sub(rf"\b{name}\b(?! =)", "lg", step) for name in _names(step) if name != "lg"]
        for other in plainer:
            if other != step:
                yield replace(program, steps=(*program.steps[:position], other, *program.steps[position + 1 :]))


def _size(program: Program) -> tuple[int, ...]:
    plain = Setup(bias=False)
    told = sum(getattr(program.setup, k) != v for k, v in plain.__dict__.items())
    names = {n for step in program.steps for n in _names(step)}
    return len(program.steps), len(program.roots), len(names), told, sum(map(len, program.steps))


def shrink(
    program: Program, difference: Difference, wrong: Callable[[str], str] | None = None, layout: bool = False
) -> Program:
    """A smaller program with a difference of the same kind."""
    while True:
        for other in _simpler(program):
            if _size(other) >= _size(program):
                continue
            found = compare(other, wrong, layout)
            if found is not None and found.kind == difference.kind:
                program = other
                break
        else:
            return program


@dataclass(frozen=True)
class Finding:
    seed: int
    program: Program
    difference: Difference

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.difference}\n{self.program}\n"


def check(seed: int, wrong: Callable[[str], str] | None = None, layout: bool = False) -> Finding | None:
    """Run the program of a seed on both models; what differs is shrunk."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = draw(seed)
        difference = compare(program, wrong, layout)
        if difference is None:
            return None
        program = shrink(program, difference, wrong, layout)
        again = compare(program, wrong, layout)
        return Finding(seed, program, again or difference)


def _checked(seed: int, layout: bool) -> Finding | None:
    try:
        return check(seed, layout=layout)
    except Exception as error:
        raise RuntimeError(f"the fuzzer itself failed at seed {seed}:\n{traceback.format_exc()}") from error


def main() -> None:
    parser = argparse.ArgumentParser(description="Random programs on lazy logits and on real ones.")
    parser.add_argument("--count", type=int, default=50_000, help="how many seeds")
    parser.add_argument("--start", type=int, default=0, help="the first of them")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--layout", action="store_true", help="compare strides, and what autograd refuses of views")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(arguments.start, arguments.start + arguments.count)
    checked = functools.partial(_checked, layout=arguments.layout)
    started, found = time.perf_counter(), 0
    with contextlib.ExitStack() as stack:
        findings: Iterable[Finding | None] = map(checked, seeds)
        if arguments.workers > 1:
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(context.Pool(arguments.workers, torch.set_num_threads, (1,)))
            findings = pool.imap(checked, seeds, chunksize=50)
        for finding in findings:
            if finding is not None:
                found += 1
                print(finding, flush=True)
    print(f"{found} of {len(seeds)} seeds differ; {time.perf_counter() - started:.0f} s")
    sys.exit(found > 0)


if __name__ == "__main__":
    main()
