"""The demo (`make demo`): fine-tune a causal language model twice, stock and patched by flce, and compare the runs.

The two runs differ by one line, `flce.patch_model(model)`. The other scripts of this folder import functions from this
module. Slow imports are inside the functions that use them, so that `--help` is fast.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.metadata
import itertools
import math
import os
import random
import statistics
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn
from unittest import mock

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import flce
from flce.core.sizes import MIB
from flce.testing import VOCAB_SIZE, tiny_model

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache"
sys.path.append(str(ROOT))  # of `benchmarks`

# --- text of this machine, without a download ---

END_OF_TEXT = "<|endoftext|>"
# Folders of the standard library with tests, tables, or other packages.
NOT_PROSE = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages"}


def read_documents(source: Path | None = None) -> list[str]:
    """Return the text of a file, of every file in a folder, or (None) of Python's standard library."""
    if source is None:
        root = Path(sysconfig.get_path("stdlib"))
        files = [file for file in root.rglob("*.py") if NOT_PROSE.isdisjoint(file.relative_to(root).parts)]
    else:
        files = [file for file in source.rglob("*") if file.is_file()] if source.is_dir() else [source]
    documents = []
    for file in sorted(files):
        with contextlib.suppress(UnicodeDecodeError):  # a binary file
            documents.append(file.read_text(encoding="utf-8"))
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise ValueError("there is no text to train on: give a file or folder with text")
    return documents


def tiny_tokenizer(vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerBase:
    """Return a byte-level BPE tokenizer. It is trained on the standard library once, then read from the cache."""
    from tokenizers import ByteLevelBPETokenizer, __version__
    from transformers import PreTrainedTokenizerFast

    file = CACHE / f"tokenizer-{vocab_size}-{sys.version_info[0]}.{sys.version_info[1]}-{__version__}.json"
    if not file.exists():
        tokenizer = ByteLevelBPETokenizer()
        tokenizer.train_from_iterator(read_documents(), vocab_size, special_tokens=[END_OF_TEXT], show_progress=False)
        if (found := tokenizer.get_vocab_size()) < vocab_size:
            raise ValueError(f"vocab_size={vocab_size} is too large: the standard library has {found:,} tokens")
        CACHE.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")
        tokenizer.save(str(unfinished))
        unfinished.replace(file)
    return PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)


def token_batches(
    documents: list[str], tokenizer: PreTrainedTokenizerBase, shape: tuple[int, int, int], seed: int = 0
) -> npt.NDArray[np.int64]:
    """Return the tokens of the shuffled documents as (steps, batch, sequence). Few documents are repeated."""
    import numpy as np

    sample = tokenizer.encode(" ".join(documents)[:10_000], add_special_tokens=False)
    num_known = len([token for token in sample if token != tokenizer.unk_token_id])
    if num_known <= len(sample) / 2:
        raise ValueError(f"the tokenizer has {num_known} of {len(sample)} tokens: give a model with its tokenizer")
    order = random.Random(seed).sample(documents, len(documents))
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    texts = (tokenizer.encode(document, add_special_tokens=False) + end for document in itertools.cycle(order))
    return np.fromiter(itertools.chain.from_iterable(texts), dtype=np.int64, count=math.prod(shape)).reshape(shape)


@functools.cache
def examples(count: int, tokens: int = 64, seed: int = 0) -> Any:
    """Return a data set of pieces of Python's standard library: a list of `input_ids` and `labels`.

    The first labels of each piece are ignored, as for a prompt. Their number differs between pieces.
    """
    import torch

    rows = torch.from_numpy(token_batches(read_documents(), tiny_tokenizer(), (count, 1, tokens), seed)[:, 0])
    prompt = torch.arange(tokens) < (torch.arange(count) % (tokens // 2))[:, None]
    labels = rows.masked_fill(prompt, -100)
    return [{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)]


def excerpts(count: int, tokens: int = 64, seed: int = 0) -> list[str]:
    """Return the pieces of `examples` as text."""
    return tiny_tokenizer().batch_decode([row["input_ids"].tolist() for row in examples(count, tokens, seed)])


# --- shared by the scripts: a stock and a patched run of a trainer ---


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def cannot_run(reason: str) -> NoReturn:
    """End the script with one sentence and status 2, which means for `make recipes`: not on this machine."""
    typer.echo(f"{Path(sys.argv[0]).name} cannot run here: {reason}", err=True)
    raise typer.Exit(2)


def need_packages(*packages: str) -> None:
    """End the script if a package is missing. `packages` are names for pip."""
    for package in packages:
        try:
            importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            cannot_run(f"{package} is not installed; python -m pip install {package} installs it.")


def is_fused(loss: Tensor) -> bool:
    """Return True if the autograd graph of `loss` has an operator of flce."""
    seen, nodes = set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            function = getattr(type(node), "_forward_cls", None)  # of an `autograd.Function`; an operator has a name
            if "flce" in type(node).__name__ or (function is not None and function.__module__.startswith("flce.")):
                return True
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
    return False


@dataclass
class Curve:
    """Training losses of the steps (with gradient accumulation: of the micro-batches)."""

    losses: list[float] = field(default_factory=list)
    fused: list[bool] = field(default_factory=list)

    def add(self, loss: Tensor) -> None:
        self.losses.append(loss.mean().item())  # a Trainer with several devices returns one loss for each device
        self.fused.append(is_fused(loss))


@contextlib.contextmanager
def trl_installed(patched: bool) -> Iterator[None]:
    """Install flce in TRL's trainers inside the context, if `patched`."""
    from flce.huggingface import trl

    if patched:
        trl.install()
    try:
        yield
    finally:
        trl.uninstall()


@contextlib.contextmanager
def record_losses() -> Iterator[Curve]:
    """Record the loss of each backward pass of Accelerate, and so of a `Trainer`, whose log has only averages."""
    from accelerate import Accelerator

    curve, stock = Curve(), Accelerator.backward

    def backward(self: Accelerator, loss: Tensor, **arguments: Any) -> None:
        curve.add(loss)
        stock(self, loss, **arguments)

    with mock.patch.object(Accelerator, "backward", backward):
        yield curve


def save_model(folder: Path, architecture: str = "Qwen3", **sizes: Any) -> Path:
    """Save the tiny model and its tokenizer for `from_pretrained`. Return the folder."""
    tiny_model(architecture, **sizes).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    return folder / "model"


def record_curve(create_trainer: Callable[..., Any], patched: bool, **arguments: Any) -> Curve:
    """Create a trainer in a temporary folder, train, and return the losses."""
    with tempfile.TemporaryDirectory() as folder, record_losses() as curve:
        create_trainer(patched, folder, **arguments).train()
    return curve


def trainer_settings(folder: str, steps: int) -> dict[str, Any]:
    """Return the arguments of all trainers that derive from Transformers' `Trainer`."""
    quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    sizes = {"max_steps": steps, "per_device_train_batch_size": 4, "learning_rate": 1e-3}
    return {"output_dir": folder, "use_cpu": not has_gpu(), "bf16": False, **sizes, **quiet}  # TRL has bf16=True


def max_difference(stock: Curve, patched: Curve) -> float:
    """Return the largest difference of two losses, NaN if a difference is NaN (`max` alone would skip NaN)."""
    differences = [abs(a - b) for a, b in zip(stock.losses, patched.losses, strict=True)]
    return max(differences, key=lambda difference: (math.isnan(difference), difference))


def print_once(text: str) -> None:
    """Print the text in the first process of a launcher only."""
    if os.environ.get("RANK", "0") == "0":
        typer.echo(text)


def compare_runs(name: str, train: Callable[[bool], Curve], *, tolerance: float = 1e-5, fused: bool = True) -> int:
    """Run `train` without flce and with flce, on the same weights and data, and compare the losses.

    Returns:
        The exit status: 1 if a loss differs by more than `tolerance`, or if a patched step was not fused (was fused, if
        `fused` is False), else 0.
    """
    from flce.huggingface import MaterializedLogitsWarning

    stock = train(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MaterializedLogitsWarning)
        patched = train(True)
    difference, steps = max_difference(stock, patched), len(stock.losses)
    curve = f"{steps} step{'' if steps == 1 else 's'}, loss {stock.losses[0]:.4f} to {stock.losses[-1]:.4f}"
    print_once(f"{name}: {curve}; fused in {sum(patched.fused)}; max |stock - patched| {difference:.1e}")
    agree = difference <= tolerance  # False for NaN
    if not agree:
        print_once(f"The loss curves differ by more than {tolerance:.0e}.")
    as_expected = not any(stock.fused) and sum(patched.fused) == (steps if fused else 0)
    if not as_expected:
        print_once(f"Expected the fused loss in {'every' if fused else 'no'} patched step and in no stock step.")
    if agree and as_expected:
        print_once("The loss curves agree.")
    return 0 if agree and as_expected else 1


# --- the demo ---

STOCK, PATCHED = NAMES = "stock", "patched"


@dataclass
class TrainingRun:
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of each step
    memory: Any = None  # the profile of one more step
    peak_bytes: int = 0  # of that step, above the loaded model

    @property
    def step_ms(self) -> float:
        """The median, because the first steps are slow."""
        return 1e3 * statistics.median(self.seconds)


def train(load: Callable[[], Any], batches: Tensor, rate: float, patched: bool) -> TrainingRun:
    """Train a model, then record the memory of one more step."""
    import torch

    from benchmarks.memory import profile_memory

    gc.collect()  # frees the model of the run before
    model, run = load().to(batches.device).train(), TrainingRun()
    if patched:
        flce.patch_model(model)  # the only difference
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)

    def step(ids: Tensor) -> float:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss  # the model shifts the labels
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())  # waits for the device

    for ids in track(batches, PATCHED if patched else STOCK, console=Console(stderr=True)):
        start = time.perf_counter()
        run.losses.append(step(ids))
        run.seconds.append(time.perf_counter() - start)
    states = [value for state in optimizer.state.values() for value in state.values()]
    state_bytes = sum(value.nbytes for value in states if isinstance(value, torch.Tensor))
    recorded = [profile_memory(lambda: step(batches[-1]), batches.device) for _ in range(3)]
    run.memory = min(recorded, key=lambda profile: profile.samples[-1][0])  # the first recording is slow
    run.peak_bytes = state_bytes + run.memory.peak
    return run


def draw(file: Path, title: str, runs: dict[str, TrainingRun]) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from benchmarks.memory import COLOURS

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    curves = figure.subplots()
    for name, colour, width, line in zip(NAMES, COLOURS, (5, 1.5), ("-", "--"), strict=True):
        losses = runs[name].losses
        curves.plot(range(1, len(losses) + 1), losses, line, color=colour, linewidth=width, label=name)
    curves.set(title=title, xlabel="step", ylabel="loss")
    curves.xaxis.set_major_locator(MaxNLocator(integer=True))
    curves.legend(frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)


def print_table(title: str, runs: dict[str, TrainingRun]) -> None:
    table = Table("", *NAMES, "patched / stock", title=title, title_justify="left")
    for row, value, digits in (
        ("final loss", lambda run: run.losses[-1], 5),
        ("peak memory, MiB", lambda run: run.peak_bytes / MIB, 0),
        ("time per step, ms", lambda run: run.step_ms, 0),
    ):
        stock, patched = (value(runs[name]) for name in NAMES)
        table.add_row(row, f"{stock:,.{digits}f}", f"{patched:,.{digits}f}", f"{patched / stock:.0%}")
    Console().print(table)


def main(
    model: Annotated[
        str | None, typer.Option(help="smollm2, gemma3, a path or a hub id.", show_default="a small random Qwen3")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(exists=True, help="File or folder to train on.", show_default="Python's library")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, show_default="20, with --model 10; GPU: 200")] = None,
    seq_len: Annotated[int | None, typer.Option(min=2, show_default="256, with --model 128; GPU: 1024")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, show_default="8, with --model 2; GPU: 8")] = None,
    learning_rate: Annotated[float | None, typer.Option(show_default="1e-3; GPU: 3e-4; with --model: 2e-5")] = None,
    vocab_size: Annotated[int, typer.Option(min=300, help="Of the small Qwen3.")] = 32768,
    hidden_size: Annotated[
        int | None, typer.Option(min=64, help="Of that Qwen3.", show_default="128; GPU: 1024")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Its layers.", show_default="2; GPU: 4")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1)] = 0,
    output: Annotated[Path, typer.Option(help="Picture of the losses.")] = Path("demo.png"),
    memory_picture: Annotated[Path, typer.Option(help="Picture of memory over one step.")] = Path("demo-memory.png"),
) -> None:
    """Fine-tune a causal LM twice, stock and patched by flce, and compare loss, memory and time.

    The exit status is 1 if the loss curves differ.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else PyTorch's profiler writes into the progress bars
    need_packages("matplotlib", "numpy", "tokenizers", "transformers")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import real_models  # which imports this module
    from benchmarks.memory import draw_profiles

    gpu = has_gpu()
    hidden, length = hidden_size or (1024 if gpu else 128), seq_len or (1024 if gpu else 128 if model else 256)
    steps, batch_size = steps or (200 if gpu else 10 if model else 20), batch_size or (2 if model and not gpu else 8)
    rate = learning_rate or (2e-5 if model else 3e-4 if gpu else 1e-3)
    sizes: dict[str, Any] = {"vocab_size": vocab_size, "hidden_size": hidden, "intermediate_size": 3 * hidden}
    sizes |= {"num_hidden_layers": layers or (4 if gpu else 2), "head_dim": 64, "max_position_embeddings": length}
    sizes |= {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64, "tie_word_embeddings": True}

    def load() -> Any:
        torch.manual_seed(seed)
        stored = AutoModelForCausalLM.from_pretrained
        return stored(source, dtype=torch.float32) if source else tiny_model(seed=seed, **sizes)

    try:
        source = real_models.find(model) if model else None
        tokenizer = AutoTokenizer.from_pretrained(source) if source else tiny_tokenizer(vocab_size)
        shape = steps, batch_size, length
        batches = torch.from_numpy(token_batches(read_documents(text), tokenizer, shape, seed))
        batches = batches.to("cuda" if gpu else "cpu")
        # One after the other, so that only one model must fit in memory.
        runs = {name: train(load, batches, rate, patched=name == PATCHED) for name in NAMES}
    except (OSError, ValueError) as error:
        cannot_run(f"{error}")
    title = f"{model or 'A small Qwen3'}, {shape[0]} steps of {batch_size} x {length} tokens"
    draw_profiles({name: run.memory for name, run in runs.items()}, memory_picture, f"One training step\n{title}")
    draw(output, title, runs)
    differences = [abs(a - b) for a, b in zip(*(runs[name].losses for name in NAMES), strict=True)]
    # The mean decides: in bfloat16 rounding errors grow from step to step, also between two stock runs.
    mean, tolerance = statistics.mean(differences), 1e-2 if gpu else 1e-4
    agree = mean <= tolerance  # False for NaN
    print_table(title, runs)
    print(f"The loss curves {'agree' if agree else f'differ by more than {tolerance:.0e}'}: ", end="")
    print(f"{mean:.1e} on average, {max(differences):.1e} at most.\nThe pictures are {output} and {memory_picture}.")
    raise typer.Exit(0 if agree else 1)


if __name__ == "__main__":
    typer.run(main)
