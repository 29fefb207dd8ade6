"""Fine-tunes a causal language model twice, stock and patched by flce, from one seed on the same text.

    python integrations/finetune.py                              # a small Qwen3 on Python's own source
    python integrations/finetune.py --model <path or hub id> --text <file or folder>

The two runs differ by one line, `flce.patch_model(model)`. The program ends with a table, and a picture of
both loss curves, the peak memory and the time per step; its exit status is 1 if the curves do not agree.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from corpus import byte_level_tokenizer, read_documents, token_batches
from memory import PeakMemory
from report import Run, can_draw, draw, show

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# PyTorch and Transformers take seconds to import: the functions do so, and --help does not wait for them.

CACHE = Path(__file__).resolve().parents[1] / ".cache"


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
    patched: bool,
    on_step: Callable[[float], None],
) -> Run:
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

    memory = PeakMemory(device)
    losses, seconds = [], []
    for batch in batches:
        start = time.perf_counter()
        ids = torch.from_numpy(batch).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss  # the model shifts the labels
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the device
        seconds.append(time.perf_counter() - start)
        on_step(losses[-1])
    return Run(description, losses, seconds, memory.peak())


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
    try:
        for _ in batches:
            for name, connection in connections.items():
                connection.send("your turn")
                on_step(name, connection.recv())
        return {name: connection.recv() for name, connection in connections.items()}
    except (EOFError, OSError):
        raise SystemExit(f"The {name} run broke off: its own error stands above.") from None


def _work(settings: Settings, batches: npt.NDArray[np.int64], patched: bool, connection: Connection) -> None:
    def in_turn() -> Iterator[npt.NDArray[np.int64]]:
        for batch in batches:
            connection.recv()
            yield batch

    connection.send(train(settings, in_turn(), patched, on_step=connection.send))


def train_both(
    console: Console, settings: Settings, batches: npt.NDArray[np.int64], take_turns: bool
) -> dict[str, Run]:
    columns = (
        TextColumn("{task.description:8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        tasks = {
            name: progress.add_task(name, total=len(batches), start=False, state="waiting")
            for name in ("stock", "patched")
        }

        def on_step(name: str, loss: float) -> None:
            progress.update(tasks[name], advance=1, state=f"loss {loss:.4f}")

        runs: dict[str, Run] = {}
        rounds = [["stock", "patched"]] if take_turns else [["stock"], ["patched"]]
        for names in rounds:
            for name in names:
                progress.start_task(tasks[name])
                progress.update(tasks[name], state="starting")
            runs |= train_in_processes(settings, batches, names, on_step)
    return runs


def main(
    model: Annotated[
        str | None,
        typer.Option(help="Path or hub id of a causal LM.", show_default="a small Qwen3, made here"),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(exists=True, help="File or folder to train on.", show_default="Python's own library"),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, show_default="40; GPU: 200")] = None,
    seq_len: Annotated[int | None, typer.Option(min=2, show_default="256; GPU: 1024")] = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 8,
    learning_rate: Annotated[float | None, typer.Option(show_default="1e-3; GPU: 3e-4; with --model: 2e-5")] = None,
    vocab_size: Annotated[int, typer.Option(min=300, help="Of the small Qwen3.")] = 32768,
    hidden_size: Annotated[
        int | None, typer.Option(min=64, help="Of the small Qwen3.", show_default="128; GPU: 1024")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Of the small Qwen3.", show_default="2; GPU: 4")] = None,
    seed: int = 0,
    output: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("demo.png"),
) -> None:
    """Fine-tune a causal LM twice, stock and patched by flce, and compare loss, memory and time."""
    if not can_draw(output):
        raise typer.BadParameter(f"no picture can be drawn as {output.suffix}: take .png, .svg or .pdf")

    import torch
    from transformers import AutoTokenizer

    gpu = torch.cuda.is_available()
    settings = Settings(
        model=model,
        vocab_size=vocab_size,
        hidden_size=hidden_size or (1024 if gpu else 128),
        layers=layers or (4 if gpu else 2),
        seq_len=seq_len or (1024 if gpu else 256),
        seed=seed,
        learning_rate=learning_rate or (2e-5 if model else 3e-4 if gpu else 1e-3),
        device="cuda" if gpu else "cpu",
    )
    steps = steps or (200 if gpu else 40)
    console = Console()
    with console.status("Reading the text and tokenizing it"):
        try:
            if model is None:
                tokenizer = byte_level_tokenizer(vocab_size, CACHE)
            else:
                tokenizer = AutoTokenizer.from_pretrained(model)
            batches = token_batches(
                read_documents(text),
                tokenizer,
                steps=steps,
                batch_size=batch_size,
                seq_len=settings.seq_len,
                seed=seed,
            )
        except (OSError, ValueError) as error:
            raise typer.BadParameter(str(error)) from None
    # A model of the user's own may leave room for one run at a time only; so may a GPU, where time is steady.
    runs = train_both(console, settings, batches, take_turns=model is None and not gpu)

    where = torch.cuda.get_device_name() if gpu else f"the CPU, {torch.get_num_threads()} threads"
    title = (
        f"{runs['stock'].model}, vocabulary {len(tokenizer):,}, "
        f"{batch_size} x {settings.seq_len:,} tokens per step, "
        f"{'bfloat16 autocast' if gpu else 'float32'} on {where}"
    )
    agree = show(console, title, **runs, tolerance=1e-2 if gpu else 1e-4)
    draw(output, title, **runs)
    console.print(f"The picture is {output}")
    raise typer.Exit(0 if agree else 1)


if __name__ == "__main__":
    typer.run(main)
