"""``flce plan``: what a training step takes on a GPU that need not be there, and the longest sequence that fits."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from flce.cli.output import Json, print_json, stderr, stdout

if TYPE_CHECKING:
    import torch

    from flce.devices import Described
    from flce.huggingface.training_memory import Training
    from flce.options import ChunkOptions

UNITS = {"mb": 10**6, "gb": 10**9, "tb": 10**12, "mib": 2**20, "gib": 2**30, "tib": 2**40}
DTYPES = ("bfloat16", "float16", "float32")
COLOURS = {
    "weights": "blue",
    "gradients": "green",
    "optimizer": "yellow",
    "activations": "magenta",
    "loss": "red",
    "temporary": "cyan",
}
MOST_SIZE = 1 << 30  # of a shape: bytes of what is counted fit into 64 bits
BAR = 60  # characters of the longest bar
NOTE = (
    "A peak is the most that is allocated at one time of a step: weights + gradients + the optimizer's state + "
    "activations + loss + temporary. Activations are what autograd keeps for backward: of all layers without "
    "checkpointing, the inputs of all and one layer's own with it. They were counted while the model's own code ran on "
    "tensors without memory, not estimated. {libraries} MiB of cuBLAS are among temporary. A step fits if it leaves "
    "{context} MiB for the CUDA context. Gaps between tensors come on top: docs/memory.md says what to do about them."
)


def plan(
    model: Annotated[
        Path | None, typer.Option(help="Folder of a Transformers model, or its config.json. No weights are read.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(metavar="N,H,V", help="In place of a model: tokens, hidden size, classes of the loss.")
    ] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens of a sequence.", show_default=True)] = 4096,
    batch_size: Annotated[int, typer.Option(help="Sequences of a step on one GPU.")] = 1,
    dtype: Annotated[str, typer.Option(help=f"Of the weights: {', '.join(DTYPES)}.")] = "bfloat16",
    autocast: Annotated[
        str | None, typer.Option(help="Dtype of matrix products under autocast, with --dtype float32.")
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(metavar="80GiB", help="Memory of the GPU; by default that of its kind.")
    ] = None,
    device_kind: Annotated[str, typer.Option(help="Kind of the GPU, such as H100 or A100-80GB, or sm_90.")] = "H100",
    optimizer: Annotated[
        str, typer.Option(help="adamw, adamw-foreach, adamw-8bit, sgd, sgd-momentum, or none.")
    ] = "adamw",
    checkpointing: Annotated[
        bool | None,
        typer.Option("--checkpointing/--no-checkpointing", help="Only with gradient checkpointing, or only without."),
    ] = None,
    accumulation: Annotated[
        bool, typer.Option("--accumulation", help="Gradients are summed over several steps, and stay between them.")
    ] = False,
    frozen_head: Annotated[bool, typer.Option("--frozen-head", help="The output embedding is not trained.")] = False,
    budget: Annotated[str | None, typer.Option(metavar="256MiB", help="Most workspace of flce's loss.")] = None,
    json: Json = False,
) -> None:
    """Memory of a training step, stock and patched, and the longest sequence that fits. It needs no GPU.

    Example: flce plan --model ./Qwen3-0.6B --seq-len 8192 --batch-size 4 --gpu-memory 80GiB
    """
    import torch

    from flce.devices import described
    from flce.huggingface.training_memory import MOST_TOKENS, OPTIMIZERS, Training
    from flce.options import ChunkOptions

    if (model is None) == (shape is None):
        raise typer.BadParameter("give either --model or --shape")
    for name, value in (("--seq-len", seq_len), ("--batch-size", batch_size)):
        if value < 1:
            raise typer.BadParameter(f"expected a positive number, got {value}", param_hint=name)
    weights, products = _dtype(dtype, "--dtype"), _dtype(autocast, "--autocast") if autocast is not None else None
    if products is not None and weights != torch.float32:
        raise typer.BadParameter(f"goes with --dtype float32, got {dtype}", param_hint="--autocast")
    memory = _bytes(gpu_memory, "--gpu-memory") if gpu_memory is not None else None
    try:
        device = described(torch.device("cuda"), device_kind, memory)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--device-kind") from None
    if device.memory is None:
        raise typer.BadParameter(f"is needed: the memory of a {device_kind} is not known", param_hint="--gpu-memory")
    options = ChunkOptions(max_workspace_bytes=_bytes(budget, "--budget")) if budget is not None else None
    told: dict[str, Any] = {"device": {"kind": device_kind, "memory_bytes": device.memory}}
    gpu = _Gpu(device_kind, device)
    if optimizer not in OPTIMIZERS:
        raise typer.BadParameter(
            f"expected one of {', '.join(OPTIMIZERS)}, got {optimizer!r}", param_hint="--optimizer"
        )
    if shape is not None:
        tokens, hidden, vocab = _shape(shape)
        told["loss"] = _loss(tokens, hidden, vocab, products or weights, gpu, frozen_head, options)
    else:
        if seq_len * batch_size > MOST_TOKENS:
            raise typer.BadParameter(
                f"expected at most {MOST_TOKENS:,} tokens in a step, got {seq_len * batch_size:,}",
                param_hint="--seq-len",
            )
        assert model is not None
        training = Training(batch_size, weights, products, optimizer, frozen_head, accumulation, options)
        told |= _steps(model, seq_len, training, gpu, checkpointing)
    if json:
        print_json(told)
    else:
        _show(told)
    if "steps" in told and not any(step["fits"] for step in told["steps"]):
        raise typer.Exit(1)


@dataclasses.dataclass(frozen=True)
class _Gpu:
    kind: str
    device: Described

    @property
    def memory(self) -> int:
        assert self.device.memory is not None
        return self.device.memory


# ------------------------------------------------------------------------------------------------- what was given


def _dtype(name: str, option: str) -> torch.dtype:
    import torch

    if name not in DTYPES:
        raise typer.BadParameter(f"expected one of {', '.join(DTYPES)}, got {name!r}", param_hint=option)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _bytes(text: str, option: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in UNITS or float(match[1]) * UNITS[match[2]] < 1:
        raise typer.BadParameter(f"expected a size such as 80GiB, 80GB or 256MiB, got {text!r}", param_hint=option)
    return int(float(match[1]) * UNITS[match[2]])


def _shape(text: str) -> tuple[int, int, int]:
    match = re.fullmatch(r"\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*", text)
    if match is None or not all(0 < int(size) <= MOST_SIZE for size in match.groups()):
        raise typer.BadParameter(
            f"expected three positive numbers such as 8192,4096,128256, at most {MOST_SIZE}, got {text!r}",
            param_hint="--shape",
        )
    tokens, hidden, vocab = map(int, match.groups())
    return tokens, hidden, vocab


# ------------------------------------------------------------------------------------------------- what is planned


def _loss(
    tokens: int,
    hidden: int,
    vocab: int,
    dtype: torch.dtype,
    gpu: _Gpu,
    frozen_head: bool,
    options: ChunkOptions | None,
) -> dict[str, Any]:
    """The loss alone, of so many tokens."""
    import flce
    from flce.huggingface.training_memory import stock_loss_bytes

    try:
        planned = flce.plan(
            tokens,
            hidden,
            vocab,
            dtype,
            device_kind=gpu.kind,
            device_memory=gpu.memory,
            weight_grad=not frozen_head,
            options=options,
        )
    except ValueError as error:  # no plan keeps the budget
        raise typer.BadParameter(str(error), param_hint="--budget") from None
    return {
        "tokens": tokens,
        "hidden_size": hidden,
        "vocab_size": vocab,
        "stock_bytes": stock_loss_bytes(tokens, hidden, vocab, dtype, weight_grad=not frozen_head),
        "flce_bytes": planned.workspace_bytes,
        "plan": str(planned),
    }


def _steps(path: Path, seq_len: int, training: Training, gpu: _Gpu, checkpointing: bool | None) -> dict[str, Any]:
    """A step of the model in each variant, and the longest sequences."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise typer.BadParameter(
            "needs Transformers: pip install 'flce[transformers]', or give --shape N,H,V in place of a model",
            param_hint="--model",
        ) from None
    from flce.huggingface.rehearsal import ValuesNeededError
    from flce.huggingface.training_memory import CONTEXT, LIBRARIES, VARIANTS, TrainingMemory, fits, load_config

    try:
        measured = TrainingMemory(load_config(path), training, gpu.device)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--model") from None
    vocab, hidden = measured.head_shape
    products = training.autocast or training.dtype
    tokens = training.batch_size * seq_len
    loss = _loss(tokens, hidden, vocab, products, gpu, training.frozen_head, training.options)
    steps = []
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=stderr(), transient=True) as progress:
        task = progress.add_task("")
        for variant in VARIANTS:
            if checkpointing not in (None, variant.checkpointing):
                continue
            progress.update(task, description=f"a step of the model without memory: {variant}")
            try:
                step = measured.step(seq_len, variant)
                longest = measured.longest(variant, gpu.memory, start=seq_len)
            except (ValuesNeededError, TypeError) as error:
                raise typer.BadParameter(
                    f"a {measured.config.model_type} cannot be planned: {error}", param_hint="--model"
                ) from None
            steps.append(
                {
                    "patched": variant.patched,
                    "checkpointing": variant.checkpointing,
                    "peak_bytes": step.peak_bytes,
                    "parts": step.parts,
                    "fits": fits(step, gpu.memory),
                    "fused": step.fused,
                    "longest_sequence": longest,
                }
            )
    return {
        "model": {"type": measured.config.model_type, "parameters": measured.num_parameters},
        "training": {
            "sequence_length": seq_len,
            "batch_size": training.batch_size,
            "dtype": str(training.dtype).removeprefix("torch."),
            "autocast": training.autocast and str(training.autocast).removeprefix("torch."),
            "optimizer": training.optimizer,
            "accumulation": training.accumulation,
            "frozen_head": training.frozen_head,
        },
        "loss": loss,
        "steps": steps,
        "note": NOTE.format(libraries=LIBRARIES >> 20, context=CONTEXT >> 20),
    }


# --------------------------------------------------------------------------------------------------- what is shown


def _size(number: float) -> str:
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"


def _show(told: dict[str, Any]) -> None:
    console, loss, device = stdout(), told["loss"], told["device"]
    console.print(f"{device['kind']}, {_size(device['memory_bytes'])}")
    table = Table("", "memory beside inputs and gradients", title=f"The loss of {loss['tokens']:,} tokens")
    table.add_row("stock", _size(loss["stock_bytes"]))
    table.add_row("flce", _size(loss["flce_bytes"]))
    console.print(table)
    console.print(loss["plan"], soft_wrap=True)
    if "steps" not in told:
        return
    training = told["training"]
    precision = training["dtype"] + (f", autocast to {training['autocast']}" if training["autocast"] else "")
    batch = f"{training['batch_size']} x {training['sequence_length']:,} tokens"
    console.print(
        f"\n{told['model']['type']}, {told['model']['parameters'] / 1e9:.2f} billion parameters in {precision}, "
        f"{training['optimizer']}, {batch}"
    )
    console.print(_table(told["steps"], training["batch_size"]))
    for line in _chart(told["steps"], device["memory_bytes"]):
        console.print(line)
    if any(step["patched"] and not step["fused"] for step in told["steps"]):
        console.print("flce cannot fuse the loss of this model: flce.report(model) says why.", soft_wrap=True)
    console.print(told["note"], soft_wrap=True)


def _name(step: dict[str, Any]) -> str:
    return ("patched" if step["patched"] else "stock") + (", checkpointing" if step["checkpointing"] else "")


def _table(steps: list[dict[str, Any]], batch_size: int) -> Table:
    table = Table("", *(_name(step) for step in steps), title="A training step")
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("peak", *(_size(step["peak_bytes"]) for step in steps))
    for part in COLOURS:
        table.add_row(f"  {part}", *(_size(step["parts"][part]) for step in steps))
    table.add_row("fits", *("yes" if step["fits"] else "no" for step in steps))
    sequences = f"{batch_size} sequence{'s' if batch_size > 1 else ''}"
    table.add_row(f"longest, {sequences}", *(f"{step['longest_sequence']:,} tokens" for step in steps))
    return table


def _chart(steps: list[dict[str, Any]], memory: int) -> list[Text]:
    """A bar for each step, of as many letters of a part as it takes, and one for the memory that there is."""
    scale = BAR / max(memory, *(step["peak_bytes"] for step in steps))
    width = max(len(_name(step)) for step in steps)
    lines = []
    for step in steps:
        line, end, total = Text(f"{_name(step):>{width}} "), 0, 0
        for part, colour in COLOURS.items():
            total += step["parts"][part]
            start, end = end, round(total * scale)
            line.append(part[0].upper() * (end - start), style=f"white on {colour}")
        lines.append(line)
    lines.append(Text(f"{'the GPU':>{width}} " + "=" * round(memory * scale)))
    legend = Text(" " * (width + 1))
    for part, colour in COLOURS.items():
        legend.append(part[0].upper(), style=f"white on {colour}").append(f" {part}  ")
    return [*lines, legend]
