"""A step of GRPO of a whole model: the pass of the old policy, without gradients, and the training step.

Nothing is generated, and no trainer runs: the completions are random tokens, all of one length, and a model is called
as TRL's `GRPOTrainer` calls it, for log-probabilities of the completions. The loss is the trainer's default (DAPO's: a
mean over all tokens of clipped ratios times advantages, without a divergence). A case is one of the two passes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flce
from benchmarks.benchmark import Plan, planned
from benchmarks.cases import Contender, needs_package, select_contenders
from benchmarks.measure import Prepared, release
from benchmarks.models import ARCHITECTURES, MODEL, MODELS, ModelCase, build, in_turn, make_batch
from flce.huggingface import NotFusedWarning

OLD, TRAINING = PARTS = "old policy", "training step"
TEMPERATURE = 0.9
CLIP = 0.2
DRIFT = 0.1  # standard deviation of the old policy's log-probabilities from those of the model: some ratios are clipped


@dataclass(frozen=True)
class GrpoCase(ModelCase):
    """One pass of one model at one batch shape."""

    prompt: int = 0  # tokens of each sequence that have no loss
    part: str = TRAINING

    @property
    def title(self) -> str:
        return f"{self.model}, {self.part}: {self.setting}, {self.prompt} of each sequence are its prompt"


@dataclass(frozen=True)
class Completions:
    """What a step trains on: (B, S) ids, of which the last T are completions; (B,) advantages; (B, T) old values."""

    ids: Tensor
    count: int
    advantages: Tensor
    old: Tensor

    @property
    def chosen(self) -> Tensor:
        return self.ids[:, -self.count :]

    @property
    def inputs(self) -> dict[str, Tensor]:
        return {"input_ids": self.ids, "attention_mask": torch.ones_like(self.ids)}


def make_completions(case: GrpoCase, model: Any, device: torch.device) -> Completions:
    ids, count = make_batch(case, device), case.sequence - case.prompt
    advantages = torch.linspace(-1.0, 1.0, case.batch, device=device)
    made = Completions(ids, count, advantages, torch.empty(0))
    with torch.no_grad():
        out: Any = flce.linear_logprobs(hidden_states(model, made), head(model), made.chosen, temperature=TEMPERATURE)
    drift = torch.randn(out.logprob.shape, generator=torch.Generator(device).manual_seed(2), device=device)
    return replace(made, old=out.logprob + DRIFT * drift)


def head(model: Any) -> Tensor:
    weight: Tensor = model.get_output_embeddings().weight
    return weight


def hidden_states(model: Any, batch: Completions) -> Tensor:
    """Those that predict the completions, (B, T, H)."""
    states: Tensor = model.base_model(**batch.inputs, use_cache=False).last_hidden_state
    return states[:, -batch.count - 1 : -1]


# --- contenders ---

OfModel = Callable[[Any, Completions], Tensor]


def dapo(logprob: Tensor, batch: Completions) -> Tensor:
    ratio, advantage = (logprob - batch.old).exp(), batch.advantages[:, None]
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()


@dataclass(frozen=True)
class GrpoContender(Contender):
    logprobs: OfModel  # (B, T), of the completions
    loss: OfModel | None = field(default=None, kw_only=True)  # None: of the log-probabilities
    applied: Callable[[Any], AbstractContextManager[object]] = field(default=contextlib.nullcontext, kw_only=True)

    def loss_of(self, model: Any, batch: Completions) -> Tensor:
        return dapo(self.logprobs(model, batch), batch) if self.loss is None else self.loss(model, batch)


# What TRL's trainers import and a GPU machine may lack. Nothing here uses it.
STAND_INS = ("datasets", "datasets.fingerprint", "pandas", "pyarrow", "pyarrow.compute", "pyarrow.types")


class StandIn(ModuleType):
    """Any name that is imported from it is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Modules in the place of those that are missing, while others are imported."""
    absent = [name for name in STAND_INS if importlib.util.find_spec(name.partition(".")[0]) is None]
    for name in absent:
        sys.modules[name] = StandIn(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


def needs_trl(device: torch.device) -> str | None:
    with stand_ins():
        return needs_package("trl.trainer.grpo_trainer", "trl", cuda=False)(device)


@contextlib.contextmanager
def trls_head(model: Any, ours: bool) -> Iterator[None]:
    """What `GRPOTrainer` does with its model when it is made, stock or after `flce.huggingface.trl.install()`.

    A `NotFusedWarning` is an error: what would be measured is TRL's kernel.
    """
    before = dict(vars(model))
    with stand_ins():
        trainer = importlib.import_module("trl.trainer.grpo_trainer")
        integration = importlib.import_module("flce.huggingface.trl")
        if ours:
            integration.install()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", NotFusedWarning)
            trainer.add_fused_lm_head(model, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
            yield
    finally:
        integration.uninstall()
        if flce.is_patched(model):
            flce.unpatch_model(model)
        vars(model).clear()
        vars(model).update(before)


def fused_logprobs(model: Any, batch: Completions) -> Tensor:
    """As `GRPOTrainer._get_per_token_logps_and_entropies` calls a model."""
    labels = batch.ids.clone()
    labels[:, : -batch.count] = -100
    values: Tensor = model(**batch.inputs, labels=labels, fused_lm_head=True).log_probs
    return values[:, -batch.count :]


def stock_logprobs(model: Any, batch: Completions) -> Tensor:
    """All logits of the completions at once, in float32."""
    logits = model(**batch.inputs, use_cache=False, logits_to_keep=batch.count + 1).logits[:, :-1].float()
    return -F.cross_entropy((logits / TEMPERATURE).flatten(0, 1), batch.chosen.flatten(), reduction="none").view(
        batch.chosen.shape
    )


LIGER = "liger_kernel.chunked_loss"


def ligers_logprobs(model: Any, batch: Completions) -> Tensor:
    """The function that its loss takes them from."""
    function = importlib.import_module(f"{LIGER}.fused_linear_ppo")._selective_logprob_forward
    values: Tensor = function(
        hidden_states(model, batch).flatten(0, 1), head(model), batch.chosen.flatten(), temperature=TEMPERATURE
    )[0]
    return values.view(batch.chosen.shape)


def ligers_loss(model: Any, batch: Completions) -> Tensor:
    make = importlib.import_module(LIGER).LigerFusedLinearGRPOLoss
    loss_of = make(beta=0.0, use_ref_model=False, temperature=TEMPERATURE, epsilon_low=CLIP, epsilon_high=CLIP)
    chosen = batch.chosen
    call = hidden_states(model, batch), head(model), chosen, torch.ones_like(chosen), batch.advantages
    loss: Tensor = loss_of(*call, old_per_token_logps=batch.old)[0]
    return loss


trls = functools.partial(GrpoContender, logprobs=fused_logprobs, unavailable=needs_trl)
# In the order in which they are measured.
CONTENDERS = [
    trls("ours", "flce", "ours", applied=functools.partial(trls_head, ours=True)),
    trls("trl", "TRL's kernel", "peer", applied=functools.partial(trls_head, ours=False)),
    GrpoContender(
        "liger",
        "Liger's GRPO loss",
        "peer",
        ligers_logprobs,
        loss=ligers_loss,
        unavailable=needs_package(LIGER, "liger-kernel", cuda=False),
    ),
    GrpoContender("stock", "stock, all logits", "stock", stock_logprobs),
]


# --- measuring ---


@dataclass
class GrpoStep:
    """One pass, and the loss of the latest, or its mean log-probability."""

    model: Any
    batch: Completions
    part: str
    contender: GrpoContender
    loss: Tensor | None = None

    def __call__(self) -> None:
        if self.part == OLD:
            with torch.no_grad():
                self.loss = self.contender.logprobs(self.model, self.batch).mean()
            return
        try:
            loss = self.contender.loss_of(self.model, self.batch)
            loss.backward()
            self.loss = loss.detach()
        finally:
            self.model.zero_grad(set_to_none=True)


def prepare(case: GrpoCase, device: torch.device) -> Prepared:
    release()
    model = build(case, device)
    batch = make_completions(case, model, device)
    return in_turn(model, device, lambda contender: GrpoStep(model, batch, case.part, contender), None)


def both(model: str, batch: int, sequence: int, prompt: int, dtype: str = "bfloat16") -> list[GrpoCase]:
    return [GrpoCase(model, batch, sequence, dtype, prompt=prompt, part=part) for part in PARTS]


PRESETS: dict[str, Callable[[], Plan]] = {
    "tiny": lambda: planned(both("tiny-llama", 2, 24, 8, "float32"), rounds=2, seconds=1.0),
    # A minute and a half of one large GPU.
    "h200": lambda: planned(both(MODELS[0], 8, 4096, 2048), rounds=5, seconds=8.0),
}

GRPO = replace(
    MODEL,
    kind="grpo",
    about="Time and peak memory of a step of GRPO of whole models, with random weights.",
    noun="GRPO",
    case_type=GrpoCase,
    sizes="batch,sequence,prompt",
    presets=PRESETS,
    contenders=lambda case: select_contenders(CONTENDERS, case.contenders) if case.contenders else CONTENDERS,
    prepare=prepare,
    choices={"model": ARCHITECTURES, "part": PARTS},
    defaults=tuple({"model": MODELS[0], "part": part} for part in PARTS),
)
