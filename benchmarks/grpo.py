"""Time and memory of a GRPO step of a whole model: the old policy's pass without gradients, and the training step.

The completions have one length: random tokens, or Python code if the weights are not random. The model is called as
TRL's `GRPOTrainer` calls it, without a trainer.
The loss is the trainer's default (of DAPO, without a divergence). A case is one of the two passes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flce
from benchmarks.benchmark import Plan, plan_cases
from benchmarks.cases import Contender, needs_package, select_contenders
from benchmarks.measure import Prepared, release
from benchmarks.models import (
    ARCHITECTURES,
    MODEL,
    MODELS,
    OF_REAL_MODEL,
    TRAINED,
    WEIGHTS,
    ModelCase,
    build,
    make_batch,
    needs_trl,
    share_model,
    trl_head,
)

OLD, TRAINING = PARTS = "old policy", "training step"
TEMPERATURE = 0.9
HEAD: dict[str, Any] = {"temperature": TEMPERATURE, "outputs": ("log_probs", "entropy")}
CLIP = 0.2
DRIFT = 0.1  # standard deviation of the old log-probabilities from the model's: some ratios are clipped


@dataclass(frozen=True)
class GrpoCase(ModelCase):
    prompt: int = 0  # tokens of each sequence that have no loss
    part: str = TRAINING

    @property
    def title(self) -> str:
        return f"{self.model}, {self.part}: {self.setting}, {self.prompt} of each sequence are its prompt"


@dataclass(frozen=True)
class Completions:
    """The data of a step: (B, S) ids, of which the last T are completions; (B,) advantages; (B, T) old values."""

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
    batch = Completions(ids, count, advantages, torch.empty(0))
    with torch.no_grad():
        states = hidden_states(model, batch)
        out: Any = flce.linear_logprobs(states, model.lm_head.weight, batch.chosen, temperature=TEMPERATURE)
    drift = torch.randn(out.logprob.shape, generator=torch.Generator(device).manual_seed(2), device=device)
    return replace(batch, old=out.logprob + DRIFT * drift)


def hidden_states(model: Any, batch: Completions) -> Tensor:
    """Return the hidden states that predict the completions, (B, T, H)."""
    states: Tensor = model.base_model(**batch.inputs, use_cache=False).last_hidden_state
    return states[:, -batch.count - 1 : -1]


def dapo_loss(logprob: Tensor, batch: Completions) -> Tensor:
    ratio, advantage = (logprob - batch.old).exp(), batch.advantages[:, None]
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()


@dataclass(frozen=True)
class GrpoContender(Contender):
    compute: Callable[[Any, Completions], Tensor]  # the log-probabilities of the completions (B, T), or the loss
    applied: Callable[[Any], AbstractContextManager[object]] = field(default=contextlib.nullcontext, kw_only=True)


def ours(model: Any, **options: Any) -> AbstractContextManager[None]:
    chosen = flce.ChunkOptions(**options) if options else None
    return trl_head(model, lambda: importlib.import_module("flce.huggingface.trl").install(options=chosen), **HEAD)


def fused_logprobs(model: Any, batch: Completions) -> Tensor:
    """Call the model as `GRPOTrainer._get_per_token_logps_and_entropies` does."""
    labels = batch.ids.clone()
    labels[:, : -batch.count] = -100
    values: Tensor = model(**batch.inputs, labels=labels, fused_lm_head=True).log_probs
    return values[:, -batch.count :]


def stock_logprobs(model: Any, batch: Completions) -> Tensor:
    """Compute the log-probabilities from all logits of the completions, in float32."""
    logits = model(**batch.inputs, use_cache=False, logits_to_keep=batch.count + 1).logits[:, :-1].float()
    losses = F.cross_entropy((logits / TEMPERATURE).flatten(0, 1), batch.chosen.flatten(), reduction="none")
    return -losses.view(batch.chosen.shape)


LIGER = "liger_kernel.chunked_loss"


def liger_loss(model: Any, batch: Completions) -> Tensor:
    loss_class = importlib.import_module(LIGER).LigerFusedLinearGRPOLoss
    module = loss_class(beta=0.0, use_ref_model=False, temperature=TEMPERATURE, epsilon_low=CLIP, epsilon_high=CLIP)
    chosen = batch.chosen
    call = hidden_states(model, batch), model.lm_head.weight, chosen, torch.ones_like(chosen), batch.advantages
    loss: Tensor = module(*call, old_per_token_logps=batch.old)[0]
    return loss


C, needs_liger = GrpoContender, needs_package(LIGER, "liger-kernel", cuda=False)
of_trl = functools.partial(GrpoContender, compute=fused_logprobs, unavailable=needs_trl)
only_training: dict[str, Any] = {"applies": lambda case, device: case.part == TRAINING}
CONTENDERS = [
    of_trl("ours", "flce", "ours", applied=ours),
    of_trl("trl", "TRL's kernel", "peer", applied=functools.partial(trl_head, **HEAD)),
    C("liger", "Liger's GRPO loss", "peer", liger_loss, unavailable=needs_liger, **only_training),
    C("stock", "stock, all logits", "stock", stock_logprobs),
]
# Measured only if a case names it.
SAMPLED = of_trl(
    "ours-sampled", "flce, sampled gradients", "ours", applied=functools.partial(ours, sample_below=2.0**-12)
)
NAMES = ("ours", "ours-sampled", "trl", "liger", "stock")


def contenders_of(case: GrpoCase) -> Sequence[GrpoContender]:
    return select_contenders([*CONTENDERS, SAMPLED], case.contenders) if case.contenders else CONTENDERS


@dataclass
class GrpoStep:
    """One pass, and the loss or the mean log-probability of the latest."""

    model: Any
    batch: Completions
    part: str
    contender: GrpoContender
    loss: Tensor | None = None
    optimizer: None = None

    def __call__(self) -> None:
        training = self.part == TRAINING
        try:
            with torch.set_grad_enabled(training):
                found = self.contender.compute(self.model, self.batch)
                value = found if found.dim() == 0 else dapo_loss(found, self.batch) if training else found.mean()
            if training:
                value.backward()
            self.loss = value.detach()
        finally:
            self.model.zero_grad(set_to_none=True)


def prepare(case: GrpoCase, device: torch.device) -> Prepared:
    release()
    model = build(case, device)
    batch = make_completions(case, model, device)
    return share_model(model, device, lambda contender: GrpoStep(model, batch, case.part, contender))


TINY, LARGE = GrpoCase("tiny-llama", 2, 24, "float32", prompt=8), GrpoCase(MODELS[0], 8, 4096, prompt=2048)
OF_TRAINED = [
    replace(LARGE, model="Gemma-3-270m", weights=OF_REAL_MODEL, contenders=NAMES),
    replace(LARGE, weights=TRAINED, contenders=NAMES),
]
PRESETS: dict[str, Callable[[], Plan]] = {
    "tiny": lambda: plan_cases([replace(TINY, part=part) for part in PARTS], rounds=2, seconds=1.0),
    # A minute and a half of one large GPU.
    "h200": lambda: plan_cases([replace(LARGE, part=part) for part in PARTS], rounds=5, seconds=8.0),
    # Training steps of trained models, because gradients of random weights are dense. A minute and a half.
    "sampled": lambda: plan_cases(OF_TRAINED, rounds=3, seconds=2.5),
}

GRPO = replace(
    MODEL,
    kind="grpo",
    about="Time and peak memory of a GRPO step of whole models.",
    case_type=GrpoCase,
    sizes="batch,sequence,prompt",
    presets=PRESETS,
    contenders=contenders_of,
    prepare=prepare,
    choices={"model": ARCHITECTURES, "part": PARTS, "weights": WEIGHTS},
    defaults=tuple({"model": MODELS[0], "part": part} for part in PARTS),
)
