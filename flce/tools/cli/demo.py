"""``flce demo``: fine-tunes a causal language model twice, stock and patched by flce, and compares the two.

The two runs differ by one line, `flce.patch_model(model)`.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from flce.core.sizes import size_text
from flce.tools.cli.output import (
    Json,
    MissingError,
    check_picture,
    given,
    print_json,
    print_table,
    stderr,
    stdout,
    wrong,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from rich.console import Console

    from flce.tools.demo.report import TrainingRun
    from flce.tools.demo.training import Settings

PACKAGES = ("matplotlib", "numpy", "tokenizers", "transformers")


def demo(
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
    layers: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Of the small Qwen3.", show_default="2; GPU: 4")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1)] = 0,
    output: Annotated[Path, typer.Option(help="Where the picture of losses, memory and time goes.")] = Path("demo.png"),
    memory_picture: Annotated[Path, typer.Option(help="Where the picture of memory over one step goes.")] = Path(
        "demo-memory.png"
    ),
    json: Json = False,
) -> None:
    """Fine-tune a causal LM twice, stock and patched by flce, and compare loss, memory and time.

    The exit status is 1 if the loss curves differ.

    Example: flce demo --model path/or/hub-id --text my-texts/ --steps 50
    """
    missing = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        raise MissingError(f"flce demo needs {' and '.join(missing)}: pip install {' '.join(missing)}")

    from flce.tools.demo.report import TrainingComparison, draw, show

    check_picture("--output", output)
    check_picture("--memory-picture", memory_picture)
    if learning_rate is not None and not 0 < learning_rate < math.inf:  # False for NaN
        raise wrong("--learning-rate", f"expected a positive number, got {learning_rate}")
    # The profiler of PyTorch 2.13 says on stderr that it begins and ends, in the progress bars.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    import torch
    from transformers import AutoTokenizer

    from flce import MemoryProfile
    from flce.huggingface.estimate.language_model import one_line
    from flce.tools.demo.corpus import byte_level_tokenizer, read_documents, token_batches
    from flce.tools.demo.training import ModelError, Settings

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
    console = stderr()
    with console.status("Reading the text and tokenizing it"):
        try:
            tokenizer = (
                byte_level_tokenizer(vocab_size, cache()) if model is None else AutoTokenizer.from_pretrained(model)
            )
        except (OSError, ValueError) as error:
            raise wrong("--vocab-size" if model is None else "--model", one_line(error)) from None
        _check_memory(steps, batch_size, settings, len(tokenizer))
        documents = given("--text", read_documents, text)
        sizes = {"steps": steps, "batch_size": batch_size, "seq_len": settings.seq_len, "seed": seed}
        batches = given("--model", functools.partial(token_batches, documents, tokenizer, **sizes))
    # A model of the user's own may leave room for one run at a time only; so may a GPU, where time is steady.
    try:
        runs = train_both(console, settings, batches, take_turns=model is None and not gpu)
    except (OSError, ModelError) as error:
        raise wrong("--model", one_line(error)) from None
    except (RuntimeError, MemoryError) as error:
        # A CPU has no class of its own for it.
        if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and "allocate memory" not in str(error):
            raise
        message = f"{settings.device} has no room to train on {batch_size} x {settings.seq_len:,} tokens per step"
        raise wrong("--batch-size", f"{message}: give smaller sizes") from None

    threads = torch.get_num_threads()
    where = torch.cuda.get_device_name() if gpu else f"the CPU, {threads} thread{'' if threads == 1 else 's'}"
    title = (
        f"{runs['stock'].model}, vocabulary {len(tokenizer):,}, "
        f"{batch_size} x {settings.seq_len:,} tokens per step, "
        f"{'bfloat16 autocast' if gpu else 'float32'} on {where}"
    )
    comparison = TrainingComparison(title, **runs, tolerance=1e-2 if gpu else 1e-4)
    draw(output, comparison)
    curves = {name: run.memory for name, run in runs.items()}
    MemoryProfile.plot_side_by_side(curves, memory_picture, f"Memory of one training step\n{title}")
    if json:
        print_json({**comparison.facts(), "pictures": [str(output), str(memory_picture)]})
    else:
        show(stdout(), comparison, print_table)
        stdout().print(f"The pictures are {output} and {memory_picture}", soft_wrap=True)
    raise typer.Exit(0 if comparison.agree else 1)


def _check_memory(steps: int, batch_size: int, settings: Settings, vocab_size: int) -> None:
    """That there is memory for the tokens of all steps, and for what stock's loss makes of the logits of one."""
    import torch

    from flce.tools.machine import memory_of

    step = batch_size * settings.seq_len
    for what, needed, where in (
        (f"the tokens of {steps:,} steps", 8 * steps * step, "cpu"),
        ("logits, their log-softmax and its gradient", 3 * 4 * step * vocab_size, settings.device),
    ):
        there = memory_of(torch.device(where))
        if needed > there:
            message = f"{what} take {size_text(needed)}, and {where} has {size_text(there)}: give smaller sizes"
            raise wrong("--batch-size", f"{batch_size:,} x {settings.seq_len:,} tokens per step: {message}")


def cache() -> Path:
    """Where the tokenizer is kept once it is trained."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flce"


def train_both(
    console: Console, settings: Settings, batches: npt.NDArray[np.int64], take_turns: bool
) -> dict[str, TrainingRun]:
    from flce.tools.demo.training import train_in_turn

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

        runs: dict[str, TrainingRun] = {}
        rounds = [["stock", "patched"]] if take_turns else [["stock"], ["patched"]]
        for names in rounds:
            for name in names:
                progress.start_task(tasks[name])
                progress.update(tasks[name], state="starting")
            runs |= train_in_turn(settings, batches, names, on_step)
    return runs
