"""One model, trained twice from one seed on the same batches: stock and patched, each in a process of its own."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from flce.demo.peak_memory import PeakMemory
from flce.demo.report import Run

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


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


def build_model(settings: Settings) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    if settings.model is not None:
        return AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    config = Qwen3Config(
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=3 * settings.hidden_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.hidden_size // 64,
        num_key_value_heads=settings.hidden_size // 64,
        head_dim=64,
        max_position_embeddings=settings.seq_len,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config)


def train(
    settings: Settings,
    batches: Iterable[npt.NDArray[np.int64]],
    steps: int,
    patched: bool,
    on_step: Callable[[float], None],
) -> Run:
    """Trains for as many steps. One more batch is for a step whose memory is recorded: recording takes time."""
    import torch

    import flce

    torch.manual_seed(settings.seed)
    device = torch.device(settings.device)
    model = build_model(settings).to(device).train()
    size = sum(parameter.numel() for parameter in model.parameters())
    description = f"{type(model).__name__}, {size / 1e6:,.1f} M parameters"
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

    memory = PeakMemory(device)
    losses, seconds = [], []
    waiting = iter(batches)
    for batch in itertools.islice(waiting, steps):
        start = time.perf_counter()
        losses.append(step(batch))
        seconds.append(time.perf_counter() - start)
        on_step(losses[-1])
    peak = memory.peak()
    last = next(waiting)
    return Run(description, losses, seconds, peak, flce.profile_memory(lambda: step(last), device=device))


def train_in_processes(
    settings: Settings,
    batches: npt.NDArray[np.int64],
    names: Sequence[str],
    on_step: Callable[[str, float], None],
) -> dict[str, Run]:
    """`train`, "stock" or "patched", in a process each, so that no run's memory is counted with another's.

    The processes take turns, step by step: what else the machine does then weighs on all of them alike.
    """
    context = multiprocessing.get_context("spawn")
    connections = {}
    for name in names:
        connections[name], theirs = context.Pipe()
        arguments = (settings, batches, name == "patched", theirs)
        context.Process(target=_work, args=arguments, daemon=True).start()
        theirs.close()
    runs = {}
    try:
        for _ in batches:
            for name, connection in connections.items():
                connection.send("your turn")
                on_step(name, connection.recv())
        for name, connection in connections.items():
            connection.send("your turn")  # to record a step
            runs[name] = connection.recv()
    except (EOFError, OSError):
        raise SystemExit(f"The {name} run broke off: its own error stands above.") from None
    return runs


def _work(settings: Settings, batches: npt.NDArray[np.int64], patched: bool, connection: Connection) -> None:
    # Before PyTorch is imported: the profiler of 2.13 says on stderr that it begins and ends, in the progress bars.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")

    def in_turn() -> Iterator[npt.NDArray[np.int64]]:
        for batch in (*batches, batches[-1]):
            connection.recv()
            yield batch

    connection.send(train(settings, in_turn(), len(batches), patched, on_step=connection.send))
