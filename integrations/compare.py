"""What the trainers' scripts share: real text for a tiny model, and the comparison of a stock and a patched run.

What takes seconds to import is imported by the functions that use it, so that the scripts' --help does not wait for it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from unittest import mock

import typer

from flce.testing.models import VOCAB_SIZE, tiny_model
from flce.tools.demo.corpus import byte_level_tokenizer, read_documents, token_batches

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

CACHE = Path(__file__).resolve().parents[1] / ".cache"


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def cannot_run(reason: str) -> NoReturn:
    """Ends the script with one sentence and status 2, which `make recipes` takes for "not on this machine"."""
    typer.echo(f"{Path(sys.argv[0]).name} cannot run here: {reason}", err=True)
    raise typer.Exit(2)


def need(*packages: str) -> None:
    """Ends the script where a package, which is named as pip names it, is missing."""
    for package in packages:
        try:
            importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            cannot_run(f"{package} is not installed; python -m pip install {package} installs it.")


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = byte_level_tokenizer(VOCAB_SIZE, CACHE)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@functools.cache
def examples(count: int, tokens: int = 64, seed: int = 0) -> Any:
    """A data set of pieces of Python's standard library: a list of `input_ids` and the `labels` for them.

    The first labels of a piece are ignored, as those of a prompt would be: of each piece, a number of its own.
    """
    import torch

    ids = token_batches(read_documents(None), tiny_tokenizer(), steps=count, batch_size=1, seq_len=tokens, seed=seed)
    rows = torch.from_numpy(ids[:, 0])
    prompt = torch.arange(tokens) < (torch.arange(count) % (tokens // 2))[:, None]
    labels = rows.masked_fill(prompt, -100)
    return [{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)]


def excerpts(count: int, tokens: int = 64, seed: int = 0) -> list[str]:
    """The same pieces, as text."""
    return tiny_tokenizer().batch_decode([row["input_ids"].tolist() for row in examples(count, tokens, seed)])


def is_fused(loss: Tensor) -> bool:
    """Whether an operator of flce is in the graph that `loss` was computed by."""
    seen, nodes = set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            made_by = getattr(type(node), "_forward_cls", None)  # an `autograd.Function`; operators have it in the name
            if "flce" in type(node).__name__ or (made_by is not None and made_by.__module__.startswith("flce.")):
                return True
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
    return False


@dataclass
class Curve:
    """The training loss of each step (with gradient accumulation: of each micro-batch)."""

    losses: list[float] = field(default_factory=list)
    fused: list[bool] = field(default_factory=list)

    def add(self, loss: Tensor) -> None:
        self.losses.append(loss.mean().item())  # one of each device where a Trainer sees several
        self.fused.append(is_fused(loss))


@functools.cache
def keeping_losses(trainer: Any) -> Any:
    """A subclass of `trainer`, which is Transformers' `Trainer` or made of it, that keeps each step's loss in `curve`.

    What a trainer logs are averages.
    """
    import torch

    class CurveTrainer(trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.curve = Curve()
            super().__init__(*args, **kwargs)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            result = super().compute_loss(*args, **kwargs)
            if torch.is_grad_enabled():  # not in evaluation
                self.curve.add(result[0] if isinstance(result, tuple) else result)
            return result

    return CurveTrainer


@contextlib.contextmanager
def trl_installed(patched: bool) -> Iterator[None]:
    """TRL's trainers compute with flce within it, if they are to."""
    from flce.huggingface import trl

    if patched:
        trl.install()
    try:
        yield
    finally:
        trl.uninstall()


@contextlib.contextmanager
def losses_of_accelerate() -> Iterator[Curve]:
    """The loss of each backward by Accelerate, for trainers that make their `Trainer` themselves."""
    from accelerate import Accelerator

    curve, stock = Curve(), Accelerator.backward

    def backward(self: Accelerator, loss: Tensor, **arguments: Any) -> None:
        curve.add(loss)
        stock(self, loss, **arguments)

    with mock.patch.object(Accelerator, "backward", backward):
        yield curve


def save_model(folder: Path, architecture: str = "Qwen3", **sizes: Any) -> Path:
    """A folder with the tiny model and its tokenizer, as `from_pretrained` reads it."""
    tiny_model(architecture, **sizes).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    return folder / "model"


def curve_of(make_trainer: Callable[..., Any], patched: bool, **arguments: Any) -> Curve:
    """Trains with a trainer that keeps its losses, made in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(patched, folder, **arguments)
        trainer.train()
        return trainer.curve


def trainer_settings(folder: str, steps: int) -> dict[str, Any]:
    """What all trainers made of Transformers' are called with."""
    return {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": not has_gpu(),
        "bf16": False,  # TRL's own default is True
    }


def max_difference(stock: Curve, patched: Curve) -> float:
    """NaN if one is: `max` alone would pass it over."""
    differences = [abs(a - b) for a, b in zip(stock.losses, patched.losses, strict=True)]
    return max(differences, key=lambda difference: (math.isnan(difference), difference))


def say(text: str) -> None:
    """The first of the processes that a launcher started speaks."""
    if os.environ.get("RANK", "0") == "0":
        typer.echo(text)


def compare(name: str, train: Callable[[bool], Curve], *, tolerance: float = 1e-5, fused: bool = True) -> int:
    """Runs `train`, without flce and with it, and tells whether the loss curves are the same.

    Args:
        name: what is trained with.
        train: trains a model from always the same weights on the same data; its argument says whether with flce.
        tolerance: of the losses' largest difference.
        fused: whether the fused loss is to run in every patched step, or in none.

    Returns:
        0, or 1 if the curves differ or a step was not fused (or was) against expectation. It is for the shell.
    """
    from flce.huggingface import MaterializedLogitsWarning

    stock = train(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MaterializedLogitsWarning)
        patched = train(True)
    difference = max_difference(stock, patched)
    steps = len(stock.losses)
    say(
        f"{name}: {steps} step{'' if steps == 1 else 's'}, loss {stock.losses[0]:.4f} to {stock.losses[-1]:.4f}; "
        f"fused in {sum(patched.fused)}; max |stock - patched| {difference:.1e}"
    )
    agree = difference <= tolerance  # False for NaN
    if not agree:
        say(f"The loss curves differ by more than {tolerance:.0e}.")
    as_expected = not any(stock.fused) and sum(patched.fused) == (steps if fused else 0)
    if not as_expected:
        say(f"The fused loss was to run in {'every' if fused else 'no'} patched step, and in no stock one.")
    if agree and as_expected:
        say("The loss curves agree.")
    return 0 if agree and as_expected else 1
