"""One model, trained twice from one seed on the same batches: stock and patched."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import flce
from flce.testing.models import tiny_model
from flce.tools.demo.report import TrainingRun

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


RECORDINGS = 3  # of the memory over a step


@dataclass(frozen=True)
class Settings:
    """What both runs have in common."""

    model: str | None  # a path or hub id; None builds a small Qwen3
    vocab_size: int  # these three: of the small Qwen3
    hidden_size: int
    layers: int
    seq_len: int
    seed: int
    learning_rate: float
    device: str  # "cuda" trains in bfloat16 autocast, "cpu" in float32


class ModelError(ValueError):
    """A model cannot be trained on these tokens."""


def build_model(settings: Settings) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    if settings.model is not None:
        try:
            return AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
        except ValueError as error:  # such as a config of a model that is no causal one
            raise ModelError(f"{error}") from None
    heads = settings.hidden_size // 64
    return tiny_model(
        seed=settings.seed,
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=3 * settings.hidden_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=64,
        max_position_embeddings=settings.seq_len,
        tie_word_embeddings=True,
    )


def train(settings: Settings, batches: npt.NDArray[np.int64], patched: bool) -> Iterator[float | TrainingRun]:
    """The loss of each step, and at the end the run.

    Recording takes time, so the last batch is trained on again for it. The first recording is slow, and any may be
    disturbed: each time the run comes with the fastest so far.
    """
    import torch

    torch.manual_seed(settings.seed)
    device = torch.device(settings.device)
    model = build_model(settings).to(device).train()
    known, most = model.get_input_embeddings().num_embeddings, int(batches.max())
    if most >= known:
        raise ModelError(f"the tokenizer gives token {most:,}, and the model knows {known:,}: are they of one model?")
    size = sum(parameter.numel() for parameter in model.parameters())
    if patched:
        flce.patch_model(model)  # all that is different
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, fused=True)

    def step(batch: npt.NDArray[np.int64]) -> float:
        ids = torch.from_numpy(batch).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss  # the model shifts the labels
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())  # waits for the device

    losses, seconds = [], []
    for batch in batches:
        start = time.perf_counter()
        losses.append(step(batch))
        seconds.append(time.perf_counter() - start)
        yield losses[-1]
    states = (value for state in optimizer.state.values() for value in state.values())
    held = sum(value.nbytes for value in states if isinstance(value, torch.Tensor))
    description = f"{type(model).__name__}, {size / 1e6:,.1f} M parameters"
    recorded = []
    for _ in range(RECORDINGS):
        recorded.append(flce.profile_memory(lambda: step(batches[-1]), device=device))
        memory = min(recorded, key=lambda profile: profile.seconds)
        yield TrainingRun(description, losses, seconds, held + memory.peak, memory)


def train_in_turn(
    settings: Settings,
    batches: npt.NDArray[np.int64],
    names: Sequence[str],
    on_step: Callable[[str, float], None],
) -> dict[str, TrainingRun]:
    """`train`, "stock" or "patched", step by step in turn: what else the machine does then weighs on all alike."""
    import torch

    runs: dict[str, TrainingRun] = {}
    trainings = {name: train(settings, batches, name == "patched") for name in names}
    for _, (name, training) in itertools.product(range(len(batches) + RECORDINGS), trainings.items()):
        found = next(training)
        if isinstance(found, TrainingRun):
            runs[name] = found
        else:
            on_step(name, found)
    trainings.clear()  # and the models with them
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return runs
