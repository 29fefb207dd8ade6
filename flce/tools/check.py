"""The checks of `flce check`: calls of flce, their references, and the comparison with float64.

Checks of a head that is divided over processes run in every process (`run_split`).
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import flce
from flce.core.options import ChunkOptions
from flce.core.shard import all_gather, shard_bounds
from flce.engine.case import dtype_text
from flce.testing import VOCAB_SIZE, tiny_model
from flce.testing.oracle import OracleResult, dense_logits, token_results
from flce.testing.problem import (
    EXACT_LOGITS,
    LOGITS_STD,
    MODELS,
    RESULTS,
    CallResult,
    Problem,
    Tolerance,
    make_problem,
    relative_error,
    run_fused,
    run_oracle,
    run_stock,
)
from flce.tools.machine import BACKENDS, exact_device, use_backend, why_no_backend, why_no_dtype

if TYPE_CHECKING:
    from typing_extensions import Self

Results = Mapping[str, Tensor]
"""Computed tensors by name: losses, statistics, gradients."""
Source = Literal["flce", "stock", "float64"]
"""The code that computes results: flce, PyTorch's operators in the same dtype, or a reference in float64."""
STATISTICS = ("lse", "logprob", "entropy", "candidate_logprob")
CPU, BF16, F16, F32, F64 = torch.device("cpu"), torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = BF16, F32, F16, F64
LARGE_BYTES = 16 << 30  # memory for stock's results and the float64 results of LARGE, with a margin
CANDIDATES = 5


class Shape(NamedTuple):
    tokens: int
    hidden: int | None  # None: without a head; the inputs are logits
    vocab: int


SMALL = Shape(256, 64, 1000)
# More than 2^28 logits of a head of 2^25 entries: for these Hopper has separate kernels (docs/architecture.md).
LARGE = Shape(8192, 2048, 33000)
ROWS = Shape(64, None, 2049)
TOKENS = Shape(64, None, VOCAB_SIZE)  # of a model


@dataclass(frozen=True)
class Figure:
    """The distance of one result from float64."""

    what: str
    error: float
    stock: float
    """The error of PyTorch's operators."""
    allowed: float

    @property
    def is_off(self) -> bool:
        return not self.error <= self.allowed  # NaN is off

    @property
    def share(self) -> float:
        """The error divided by the allowed error."""
        return self.error / self.allowed if self.error == self.error else math.inf

    def __str__(self) -> str:
        return f"{self.what} {self.error:.2e} from float64, allowed {self.allowed:.2e}, stock {self.stock:.2e}"


def compare_results(ours: Results, stock: Results, truth: Results, tolerance: Tolerance) -> tuple[Figure, ...]:
    """Return a figure for each result of flce."""
    figures = []
    for what, got in ours.items():
        slack = tolerance.loss if what in ("loss", *STATISTICS) else tolerance.gradient
        error, stock_error = (relative_error(result, truth[what]) for result in (got, stock[what]))
        figures.append(Figure(what, error, stock_error, tolerance.factor * stock_error + slack))
    return tuple(figures)


@dataclass(frozen=True)
class CheckResult:
    device: str
    backend: str
    title: str
    dtype: str
    status: Literal["right", "off", "failed"]
    """"off": further from float64 than allowed, or different in a second run. "failed": an exception."""
    figures: tuple[Figure, ...] = ()
    wrong: tuple[str, ...] = ()
    """Sentences, one for each fault."""

    @property
    def worst(self) -> Figure | None:
        """The figure with the largest share of its allowed error, or None."""
        return max(self.figures, key=lambda figure: figure.share, default=None)


def results_by_name(result: CallResult | OracleResult) -> Results:
    """Return the loss, the statistics and the gradients that are not None."""
    statistics = result.output if isinstance(result, CallResult) else result
    found = {"loss": result.loss, **{name: getattr(statistics, name, None) for name in STATISTICS}}
    found |= {"input gradient": result.grad_input, "weight gradient": result.grad_weight}
    found |= {"bias gradient": result.grad_bias}
    for number, (a, b) in enumerate(result.grad_adapters, 1):
        found |= {f"adapter {number} input gradient": a, f"adapter {number} weight gradient": b}
    return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class Check:
    """A call of `flce.fused_linear_cross_entropy` or, if there is no head, of `flce.cross_entropy`."""

    title: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `make_problem`."""
    call: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `run_fused`."""
    shape: Shape = SMALL
    dtypes: tuple[torch.dtype, ...] = DTYPES
    """The dtypes in which the check may run."""
    device: torch.device = CPU
    backend: str = "torch"
    dtype: torch.dtype = F32

    def at(self, device: torch.device, backend: str, dtype: torch.dtype) -> Self:
        return replace(self, device=device, backend=backend, dtype=dtype)

    @cached_property
    def problem(self) -> Problem:
        """The tensors: the same numbers on every device, rounded to the dtype."""
        tokens, hidden, vocab = self.shape
        fixed: dict[str, Any] = {"std": LOGITS_STD, "dtype": self.dtype, "device": self.device}
        return make_problem((2, tokens // 2), hidden, vocab, **fixed, **self.settings)

    @property
    def upstream(self) -> Tensor | float:
        """The upstream gradient: a different number for each token if the reduction is "none", else one number."""
        if self.settings.get("reduction") == "none":
            return torch.linspace(0.5, 1.5, self.shape.tokens).view(2, -1)
        # A float16 loss needs a scale, as in training: without it gradients are smaller than the least float16.
        return 2.0**16 if self.dtype == F16 else 1.0

    def results(self, source: Source) -> Results:
        if source == "flce":
            return results_by_name(run_fused(self.problem, grad_output=self.upstream, **self.call))
        if source == "stock":
            return results_by_name(run_stock(self.problem, self.upstream))
        return results_by_name(run_oracle(self.problem.to(exact_device(self.device)), self.upstream))

    def leaves(self, source: Source) -> Problem:
        """Return the problem with new leaves of the autograd graph, in float64 for the reference."""
        dtype, device = (F64, exact_device(self.device)) if source == "float64" else (self.dtype, self.device)
        p = self.problem.to(device)
        return p.map(lambda t, _: t.detach().to(dtype, copy=True).requires_grad_())

    def tolerance(self) -> Tolerance:
        options = self.call.get("options")
        rounds = self.shape.hidden is None or (options is not None and options.logits_dtype is not None)
        usual = RESULTS[self.dtype]
        return usual if rounds else EXACT_LOGITS.get(self.dtype, usual)

    def other_faults(self, ours: Results) -> list[str]:
        """Return the faults that are not figures: results of a second run with other bits."""
        again = self.results("flce")
        names = [what for what, got in ours.items() if not torch.equal(got, again[what])]
        return [f"A second run gave other bits: {', '.join(names)}."] if names else []

    def run(self) -> CheckResult:
        """Run the check. An exception is recorded as "failed"."""
        names = str(self.device), self.backend, self.title, dtype_text(self.dtype)
        try:
            with use_backend(self.backend):
                ours = self.results("flce")
                figures = compare_results(ours, self.results("stock"), self.results("float64"), self.tolerance())
                wrong = *(f"{figure}." for figure in figures if figure.is_off), *self.other_faults(ours)
        except Exception as error:
            return CheckResult(*names, "failed", wrong=(_describe_error(error),))
        return CheckResult(*names, "off" if wrong else "right", figures, wrong)


def _describe_error(error: Exception) -> str:
    """Return the error's class, its first line, and the innermost line of flce in its traceback."""
    package = Path(flce.__file__).parent
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(package)]
    where = f" (flce/{Path(frames[-1].filename).relative_to(package)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0] or 'no message'}{where}"


class SoftmaxCheck(Check):
    """A call of `flce.softmax` or `flce.log_softmax`, as the title says."""

    def results(self, source: Source) -> Results:
        x = self.leaves(source).input
        y = getattr(flce if source == "flce" else F, self.title)(x, -1)
        upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=F64)
        y.backward(upstream.to(self.dtype).to(y))
        return {"result": y.detach(), "gradient": x.grad}


class LogprobsCheck(Check):
    """A call of `flce.linear_logprobs`: results of targets and candidates, entropies, and the gradients of all."""

    def results(self, source: Source) -> Results:
        p, g = self.leaves(source), torch.Generator().manual_seed(1)
        x, y = p.input.flatten(0, 1), p.target.flatten()
        candidates = torch.randint(self.shape.vocab, (len(y), CANDIDATES), generator=g)
        candidates[:, 1], candidates[::2, 2] = candidates[:, 0], -1
        candidates = candidates.to(x.device)
        if source == "flce":
            given: dict[str, Any] = {"linear_bias": p.linear_bias, "candidates": candidates, **p.kwargs}
            found = vars(flce.linear_logprobs(x, p.linear_weight, y, **given))
        else:  # with products in the dtype of the problem, and logits of float32, or of float64
            z = F.linear(x, p.linear_weight, p.linear_bias)
            found = token_results(dense_logits(z if z.dtype == F64 else z.float(), None, **p.kwargs), y, candidates)
        results = {name: found[name] for name in ("logprob", "entropy", "candidate_logprob")}
        sums = [(value * torch.randn(value.shape, generator=g).to(value)).sum() for value in results.values()]
        torch.stack(sums).sum().backward()
        leaves = {"input gradient": p.input, "weight gradient": p.linear_weight, "bias gradient": p.linear_bias}
        grads = {name: leaf.grad for name, leaf in leaves.items() if leaf is not None and leaf.grad is not None}
        return {name: value.detach() for name, value in {**results, **grads}.items()}


class ModelCheck(Check):
    """A patched model: its loss and the gradients of all parameters, compared with the unpatched model."""

    def results(self, source: Source) -> Results:
        """Return the loss, the head's gradient, and the gradients of all other parameters as one vector."""
        from flce.huggingface import patch_model

        model = tiny_model("Llama", initializer_range=0.1).to(self.device, self.dtype).train()  # the same weights
        model = model.to(exact_device(self.device), F64) if source == "float64" else model
        labels = self.problem.target.to(model.device)
        ids = labels.clamp(min=0)
        if source == "float64":  # if a model computes the loss, it rounds logits to float32
            logits = model(input_ids=ids).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        else:
            model = patch_model(model, on_materialize="raise") if source == "flce" else model
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        head = model.get_output_embeddings().weight.grad
        others = [p.grad.flatten() for p in model.parameters() if p.grad is not head]
        return {"loss": loss.detach(), "head's gradient": head, "other gradients": torch.cat(others)}

    def tolerance(self) -> Tolerance:
        return MODELS[self.dtype]

    def other_faults(self, ours: Results) -> list[str]:
        return []  # operators of a model may add in any order


# ---------------------------------------------------------------------------------------------------------
# The list

CAPPED = {"label_smoothing": 0.1, "softcap": 6.0, "z_loss": 1e-3, "shift": 1, "ignored": 0.2}
OF_LARGE = (
    Check("default"),
    Check("reduction none", {"reduction": "none"}),
    Check("no gradients", call={"grads": "", "stats": ("lse", "logprob")}),
)
CHECKS = (
    *OF_LARGE,
    Check("small budget", call={"options": ChunkOptions(max_workspace_bytes=640 << 10)}),
    Check("blocks of classes", call={"options": ChunkOptions(strategy="vocab")}),
    Check("chunks of tokens", call={"options": ChunkOptions(strategy="tokens", chunk_rows=100)}),
    Check("frozen head", call={"grads": "xbaB"}),
    Check("ignored labels", {"ignored": 0.5}, {"options": ChunkOptions(skip_ignored=True)}),
    Check("softcap and more", {**CAPPED, "logit_scale": 2.0, "bias": True}, {"stats": ("lse", "logprob", "entropy")}),
    Check("adapters", {"adapter_ranks": (3, 16)}),
    Check("rounded logits", call={"options": ChunkOptions(logits_dtype=BF16)}, dtypes=(BF16,)),
    LogprobsCheck("linear_logprobs", {"ignored": 0.2, "bias": True}),
    Check("cross_entropy", CAPPED, {"stats": ("lse", "entropy")}, ROWS),
    Check("cross_entropy in place", call={"inplace": True}, shape=ROWS),
    SoftmaxCheck("softmax", shape=ROWS),
    SoftmaxCheck("log_softmax", shape=ROWS),
)
MODEL = ModelCheck("patched model", {"ignored": 0.25}, shape=TOKENS, dtypes=(F32, BF16))
LARGE_CHECKS = tuple(replace(each, title=f"large: {each.title}", shape=LARGE, dtypes=(BF16,)) for each in OF_LARGE)


def list_checks(devices: Collection[torch.device]) -> tuple[list[Check], dict[str, str]]:
    """Return the checks of these devices, and what is not checked, with the reason."""
    found: list[Check] = []
    missing: dict[str, str] = {}
    for device, backend in itertools.product(devices, BACKENDS):
        if (why := why_no_backend(device, backend)) is not None:
            missing[f"{device}, {backend} backend"] = why
            continue
        checks: tuple[Check, ...] = CHECKS
        reasons = {dtype: why_no_dtype(device, dtype) for dtype in DTYPES}
        missing |= {f"{device}, {dtype_text(dtype)}": reason for dtype, reason in reasons.items() if reason}
        if find_spec("transformers") is None:
            missing[f"{device}, patched model"] = "Transformers is not installed"
        elif backend == usual_backend(device):
            checks = *checks, MODEL
        if backend == "triton" and (free := torch.cuda.mem_get_info(device)[0]) < LARGE_BYTES:
            missing[f"{device}, large shapes"] = f"{free >> 30} GiB are free, {LARGE_BYTES >> 30} are needed"
        elif backend == "triton":
            checks = *checks, *LARGE_CHECKS
        pairs = itertools.product(checks, (dtype for dtype, reason in reasons.items() if reason is None))
        found += [check.at(device, backend, dtype) for check, dtype in pairs if dtype in check.dtypes]
    return found, missing


def usual_backend(device: torch.device) -> str:
    """Return the default backend of calls on a device."""
    return next(backend for backend in BACKENDS if why_no_backend(device, backend) is None)


# ---------------------------------------------------------------------------------------------------------
# Processes

# Seconds for a collective, and for a check with its collectives; for the first check also for the imports.
COLLECTIVE_TIMEOUT, CHECK_TIMEOUT = 60.0, 90.0
GROUPS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True)
class SplitCheck(Check):
    """A call with this process's shard of the head. The group has all processes, which have equal losses."""

    sequence_parallel: bool = False

    def results(self, source: Source) -> Results:
        if source == "flce":
            names = {"x": "input", "w": "weight", "b": "bias"}
            p = self.problem.map(lambda t, letter: self._shard(names[letter], t))
            divided = {"process_group": dist.group.WORLD, "vocab_size": self.shape.vocab}
            p = p.with_(**divided, sequence_parallel=self.sequence_parallel)
            return results_by_name(run_fused(p, grad_output=self.upstream, **self.call))
        return {what: self._shard(what, t) for what, t in super().results(source).items()}

    def other_faults(self, ours: Results) -> list[str]:
        losses = all_gather(self.results("flce")["loss"], dist.group.WORLD)
        same = all(torch.equal(losses[0], each) for each in losses)
        return super().other_faults(ours) + ([] if same else ["The processes have different losses."])

    def _shard(self, what: str, full: Tensor) -> Tensor:
        """Return the shard of a tensor, or of its gradient, of this process."""
        rank, processes = dist.get_rank(), dist.get_world_size()
        if what.startswith("input"):
            return full.chunk(processes, -2)[rank] if self.sequence_parallel else full
        if what.startswith(("weight", "bias")):
            return full[slice(*shard_bounds(self.shape.vocab, processes, rank))]
        return full


def choose_device(processes: int, device: torch.device | None) -> torch.device:
    """Return the device type of the processes: GPUs if there are enough and `device` is not a CPU, else the CPU."""
    if not dist.is_available():
        raise ValueError("needs torch.distributed, which this PyTorch does not have")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is not None and device.type == "cuda" and gpus < processes:
        raise ValueError(f"there are {gpus} GPUs for {processes} processes")
    on_gpus = gpus >= processes and (device is None or device.type == "cuda") and dist.is_nccl_available()
    return torch.device("cuda" if on_gpus else "cpu")


def split_checks(processes: int, device: torch.device | None) -> list[SplitCheck]:
    """Return the checks on the device type that `choose_device` returns."""
    device, chunks = choose_device(processes, device), {"options": ChunkOptions(chunk_rows=20)}
    even, uneven = (Shape(32 * processes, 64, vocab) for vocab in (256 * processes, 256 * processes - 3))
    smoothed = {"label_smoothing": 0.1, "z_loss": 1e-3, "bias": True}
    checks = (
        SplitCheck("equal shards", shape=even),
        SplitCheck("other shards, bias", smoothed, shape=uneven),
        SplitCheck("reduction none", {"reduction": "none", "softcap": 6.0, "ignored": 0.3}, shape=uneven),
        SplitCheck("sequence parallel", {"ignored": 0.3}, chunks, even, sequence_parallel=True),
    )
    dtypes = [dtype for dtype in DTYPES if why_no_dtype(device, dtype) is None]
    backend = usual_backend(device)
    return [check.at(device, backend, dtype) for check, dtype in itertools.product(checks, dtypes)]


def run_split(checks: Sequence[SplitCheck], processes: int) -> list[CheckResult]:
    """Run each check in every process. Stop after the first check that failed in a process."""
    context, results = multiprocessing.get_context("spawn"), list[CheckResult]()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        arguments = processes, checks[0].device.type, f"file://{folder}/store", COLLECTIVE_TIMEOUT
        pools = [stack.enter_context(context.Pool(1, _join, (rank, *arguments))) for rank in range(processes)]
        for check in checks:
            end = time.monotonic() + CHECK_TIMEOUT
            running = [pool.apply_async(check.run) for pool in pools]
            answers = []
            for each in running:
                try:
                    answers.append(each.get(max(0.0, end - time.monotonic())))
                except multiprocessing.TimeoutError:
                    sentence = f"ended or gave no result within {CHECK_TIMEOUT:.0f} s."
                    answers.append(CheckResult("", "", "", "", "failed", wrong=(sentence,)))
            results.append(_merge_results(check, answers))
            if results[-1].status == "failed":
                break
    return results


def _join(rank: int, processes: int, device_type: str, store: str, timeout: float) -> None:
    """Let a new process join the group."""
    torch.set_num_threads(1)
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    settings: dict[str, Any] = {"init_method": store, "rank": rank, "world_size": processes}
    dist.init_process_group(GROUPS[device_type], timeout=timedelta(seconds=timeout), **settings)


def _merge_results(check: SplitCheck, answers: Sequence[CheckResult]) -> CheckResult:
    """Return one result for all processes: of each figure the worst, and the faults of all processes."""
    figures = sorted((figure for each in answers for figure in each.figures), key=lambda figure: figure.share)
    return CheckResult(
        f"{len(answers)} processes, {check.device.type}, {GROUPS[check.device.type]}",
        *(check.backend, check.title, dtype_text(check.dtype)),
        max((each.status for each in answers), key=("right", "off", "failed").index),
        tuple({figure.what: figure for figure in figures}.values()),
        tuple(f"rank {rank}: {sentence}" for rank, each in enumerate(answers) for sentence in each.wrong),
    )
