"""The command ``flce plan``: the memory of a training step on any GPU, and the longest sequence that fits."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable
from dataclasses import asdict, replace
from enum import Enum
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import track
from rich.table import Column, Table

from flce.core.sizes import GIB, locate_page, parse_bytes, parse_sizes, size_text
from flce.tools.cli.output import (
    Json,
    integer_option,
    parse_option,
    print_json,
    print_table,
    stderr,
    stdout,
    usage_error,
)

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from flce.huggingface.estimate.training_memory import TrainingMemory, Variant
    from flce.planning.plan import DescribedDevice

WeightDtype = Enum("WeightDtype", {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32"})
_KEYS = ("adamw", "adamw-foreach", "adamw-8bit", "sgd", "sgd-momentum", "none")
Optimizer = Enum("Optimizer", {key: key for key in _KEYS})  # type: ignore[misc]
"""The keys of `flce.huggingface.estimate.training_memory.OPTIMIZERS`."""
# `flce.huggingface.estimate.training_memory.SHARDING_KINDS`.
ShardingKind = Enum("ShardingKind", {"fsdp": "fsdp", "zero3": "zero3"})
USUAL_LENGTH = 4096
DEFAULT_KIND = "H100"  # on a machine without a GPU
# Options of a training step. The plan of a loss alone does not have them.
STEP_OPTIONS = (
    *("seq_len", "batch_size", "optimizer", "checkpointing", "accumulation", "gpus", "sharding"),
    *("lora", "lora_targets", "load_in_4bit", "no_search"),
)


def plan(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|ID",
            help="Folder of a Transformers model, its config.json, or a hub id in the cache. No weights are read.",
        ),
    ] = None,
    shape: Annotated[
        str | None, typer.Option(metavar="N,H,V", help="Instead of a model: tokens, hidden size and classes of a loss.")
    ] = None,
    seq_len: Annotated[
        int | None,
        integer_option(1, help="Tokens of a sequence.", show_default="4096, or the model's positions if fewer"),
    ] = None,
    batch_size: Annotated[int, integer_option(1, help="Sequences of a step on one GPU.")] = 1,
    dtype: Annotated[WeightDtype, typer.Option(help="Dtype of the weights.")] = WeightDtype.bfloat16,
    autocast: Annotated[
        WeightDtype | None, typer.Option(help="Dtype of matrix products under autocast, with --dtype float32.")
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(metavar="80GiB", help="Memory of the GPU. Default: the memory of its kind.")
    ] = None,
    device_kind: Annotated[
        str | None,
        typer.Option(
            help="Kind of the GPU, such as H100, 4090 or sm_90.", show_default=f"this machine's GPU, or {DEFAULT_KIND}"
        ),
    ] = None,
    optimizer: Annotated[Optimizer, typer.Option(help="The optimizer of a step.")] = Optimizer["adamw"],
    checkpointing: Annotated[
        bool | None,
        typer.Option("--checkpointing/--no-checkpointing", help="Only with gradient checkpointing, or only without."),
    ] = None,
    accumulation: Annotated[
        bool, typer.Option("--accumulation", help="Gradients are summed over several steps and stay allocated.")
    ] = False,
    sharding: Annotated[
        ShardingKind | None, typer.Option(help="Division of the model over --gpus: FSDP or DeepSpeed ZeRO-3.")
    ] = None,
    gpus: Annotated[int | None, integer_option(2, help="Number of GPUs. Memory is printed for one GPU.")] = None,
    shards: Annotated[
        int | None, integer_option(1, help="Number of processes that divide the classes of the head, with --shape.")
    ] = None,
    lora: Annotated[
        int | None, integer_option(1, metavar="RANK", help="Train only LoRA adapters of this rank, by PEFT.")
    ] = None,
    lora_targets: Annotated[
        str | None,
        typer.Option(metavar="LAYERS", help="all-linear, or q_proj,v_proj, say.", show_default="PEFT's of the model"),
    ] = None,
    load_in_4bit: Annotated[
        bool, typer.Option("--load-in-4bit", help="Linear layers but the head in 4 bits, by bitsandbytes.")
    ] = False,
    budget: Annotated[str | None, typer.Option(metavar="256MiB", help="Limit of the workspace of flce's loss.")] = None,
    no_search: Annotated[bool, typer.Option("--no-search", help="Do not look for the longest sequence.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print the schedule of the loss too.")] = False,
    json: Json = False,
) -> None:
    """Print the memory of a training step, stock and patched, and the longest sequence that fits. Needs no GPU.

    Example: flce plan --model ./Qwen3-0.6B --seq-len 8192 --batch-size 4 --gpu-memory 80GiB
    """
    if (model is None) == (shape is None):
        raise typer.BadParameter("give either --model or --shape")
    if (sharding is None) != (gpus is None):
        raise typer.BadParameter("give both --gpus and --sharding, or neither: each GPU then has the full model")
    given = {name for name in context.params if context.get_parameter_source(name).name == "COMMANDLINE"}  # type: ignore[union-attr]
    without = {
        "--model: --shape plans the loss alone": STEP_OPTIONS if model is None else (),
        "--shape: it plans the loss of a divided head": ("shards",) if shape is None else (),
        "--lora: give a rank, such as 16": ("load_in_4bit", "lora_targets") if lora is None else (),
        f"--dtype float32, got --dtype {dtype.value}": ("autocast",) if dtype.value != "float32" else (),
    }
    for missing, names in without.items():
        for name in names:
            if name in given:
                raise usage_error(f"--{name.replace('_', '-')}", f"needs {missing}")
    has_transformers = importlib.util.find_spec("transformers") is not None  # without the import, which is slow
    if model is not None and not (has_transformers and not metadata.version("transformers").startswith("4.")):
        missing = "needs Transformers 5: pip install -U transformers, or give --shape N,H,V instead of a model"
        raise usage_error("--model", missing)
    if lora is not None and importlib.util.find_spec("peft") is None:
        raise usage_error("--lora", "the adapters are PEFT's, which is not installed: pip install peft")
    import torch

    import flce
    from flce.huggingface.estimate import training_memory
    from flce.huggingface.estimate.language_model import AdapterError, Lora, load_config
    from flce.huggingface.estimate.training_memory import Sharding, Training, TrainingMemory

    weights: torch.dtype = getattr(torch, dtype.value)
    products: torch.dtype | None = None if autocast is None else getattr(torch, autocast.value)
    gpu, kind, notes = _find_gpu(device_kind, gpu_memory, products or weights)
    memory = gpu.device.memory or 0
    budget_bytes = parse_option("--budget", parse_bytes, budget) if budget is not None else None
    options = flce.ChunkOptions(max_workspace_bytes=budget_bytes) if budget_bytes is not None else None
    on_gpu: dict[str, Any] = {"device": "cuda", "device_kind": kind, "device_memory": memory}
    plan_loss: Callable[..., Any] = functools.partial(_plan_loss, dtype=products or weights, options=options, **on_gpu)
    result: dict[str, Any] = {"device": {"kind": gpu.device.name, "memory_bytes": memory, "notes": notes}}
    console = stdout()
    console.quiet, about = json, "; ".join([f"{gpu.device.name}, {size_text(memory)}", *notes])
    if shape is not None:
        sizes = parse_option("--shape", parse_sizes, shape)
        result["loss"] = plan_loss(sizes, shards=shards)
        console.print(about, soft_wrap=True)
        _print_loss(console, result["loss"])
    else:
        assert model is not None
        step_settings = optimizer.value, accumulation, options
        divided = None if sharding is None or gpus is None else Sharding(sharding.value, gpus)
        adapters = None if lora is None else Lora(lora, lora_targets)
        training = Training(batch_size, weights, products, *step_settings, divided, adapters, load_in_4bit)
        with stderr().status("the model, without weights"):
            try:
                measured = parse_option("--model", lambda: TrainingMemory(load_config(model), training, gpu))
            except AdapterError as error:
                raise usage_error("--lora, --lora-targets", f"{error}") from None
        variants = [each for each in measured.variants if checkpointing in (None, each.checkpointing)]
        if not variants:
            raise usage_error("--checkpointing", f"a {type(measured.model).__name__} has no gradient checkpointing")
        seq_len = seq_len or min(USUAL_LENGTH, measured.positions or USUAL_LENGTH)
        result |= _plan_steps(measured, variants, seq_len, memory, plan_loss)
        console.print(about, soft_wrap=True)
        _print_steps(console, result)
        if not no_search:
            lines, positions = [], measured.positions or training_memory.MAX_TOKENS
            searched = track(variants, "longest sequence", console=stderr(), transient=True)
            for step, variant in zip(result["steps"], searched, strict=True):
                longest, obstacle = measured.find_longest(variant, memory, start=seq_len)
                step.update(longest_sequence=longest, longest_obstacle=obstacle)
                beyond = f"more than the {positions:,} positions of the config" * (longest > positions)
                why = obstacle or beyond
                lines.append(f"  {variant}: {longest:,} tokens" + (f", {why}" if why else ""))
            console.print("The longest sequence that fits:", *lines, sep="\n", soft_wrap=True)
    if verbose:
        console.print(f"The loss: {result['loss']['plan']}", soft_wrap=True)
    if json:
        print_json(result)
    if "steps" in result and not any(step["fits"] for step in result["steps"]):
        raise typer.Exit(1)


# -------------------------------------------------------------------------------------------------------- the GPU


def _find_gpu(given: str | None, size: str | None, dtype: torch.dtype) -> tuple[DescribedDevice, str | None, list[str]]:
    """Return the GPU to plan for, its kind (None: this machine's GPU), and what its plan assumes."""
    import torch

    from flce.backends import choose_backend
    from flce.core.devices import find_kinds
    from flce.planning.plan import resolve_device

    device, kind, notes = torch.device("cuda"), given, []
    memory = parse_option("--gpu-memory", parse_bytes, size) if size is not None else None
    if given is None and torch.cuda.is_available():
        notes.append("this machine's GPU")
    elif given is None:
        names = [] if memory is None else [record.name for record in find_kinds(f"{round(memory / GIB)}GB")]
        if names and DEFAULT_KIND not in names:
            raise usage_error("--device-kind", f"is needed with --gpu-memory {size}: give one of {', '.join(names)}")
        kind = DEFAULT_KIND
        notes.append("this machine has no GPU: --device-kind names another")
    gpu = parse_option("--device-kind", resolve_device, device, kind, memory)
    if gpu.device.memory is None:
        raise usage_error("--gpu-memory", f"is needed: flce has no memory size for a {kind}")
    if gpu.backend == "torch":
        reason = choose_backend(device, None if kind is None else gpu.device).reason
        notes.append(f"planned for PyTorch's operators: {reason}")
    if 0 < gpu.device.capability < 80 and dtype == torch.bfloat16:
        notes.append("without instructions for bfloat16: give --dtype float16, or --dtype float32 --autocast float16")
    return gpu, kind, notes


# ------------------------------------------------------------------------------------------------------- the plan


def _plan_loss(sizes: tuple[int, ...], shards: int | None = None, **arguments: Any) -> dict[str, Any]:
    """Return the plan of the loss alone. If the head is divided: of the process with the most classes. `arguments`: of
    `flce.plan`."""
    import flce
    from flce.huggingface.estimate.training_memory import stock_loss_bytes
    from flce.planning.search import BudgetError

    tokens, hidden, vocab = sizes
    if shards is not None and shards > vocab:
        raise usage_error("--shards", f"expected at most {vocab:,}, the classes of the head, got {shards:,}")
    try:
        planned = flce.plan(tokens, hidden, vocab, shards=shards, **arguments)
    except BudgetError as error:
        raise usage_error("--budget", f"is too small for this loss: give at least {error.least_text}") from None
    local_vocab, dtype, (weight_grad,) = planned.case.vocab_size, planned.case.dtype, planned.case.needs.weights
    return {
        "tokens": tokens,
        "hidden_size": hidden,
        "vocab_size": vocab,
        "shards": shards,
        "stock_bytes": stock_loss_bytes(tokens, hidden, local_vocab, dtype, weight_grad),
        "flce_bytes": planned.workspace_bytes,
        "plan": str(planned),
    }


def _plan_steps(
    measured: TrainingMemory, variants: list[Variant], seq_len: int, memory: int, plan_loss: Callable[..., Any]
) -> dict[str, Any]:
    """Return the memory of a step of the model in each variant; if no step fits, also of steps that need less."""
    from flce.huggingface.estimate import training_memory

    training, num_tokens = measured.training, seq_len * measured.training.batch_size
    if num_tokens > training_memory.MAX_TOKENS:
        limit = f"expected at most {training_memory.MAX_TOKENS:,} tokens in a step, got {num_tokens:,}"
        raise usage_error("--seq-len", limit)
    vocab, hidden = measured.head_shape
    loss, steps = plan_loss((num_tokens, hidden, vocab), weight_grad=training.lora is None), []
    with stderr().status("") as status:
        for variant in variants:
            status.update(f"a step of the model, {variant}")
            try:
                step = measured.step(seq_len, variant)
            except training_memory.StepError as error:
                too_long = measured.positions is not None and seq_len > measured.positions
                raise usage_error("--seq-len" if too_long else "--model", f"{error}") from None
            steps.append({**asdict(variant), **asdict(step), "fits": step.fits(memory)})
        status.update("steps that need less memory")
        patched = next(variant for variant in variants if variant.patched)
        smaller = {} if any(step["fits"] for step in steps) else _find_smaller(measured, patched, seq_len, memory)
    context, page = training_memory.CONTEXT_BYTES >> 20, locate_page("memory.md")
    return {
        "model": {
            "type": measured.config.model_type,
            "class": type(measured.model).__name__,
            "parameters": measured.num_parameters,
            "positions": measured.positions,
        },
        "training": {
            **asdict(training),
            "sequence_length": seq_len,
            "trained_parameters": sum(p.numel() for p in measured.model.parameters() if p.requires_grad),
            "sharding": None if training.sharding is None else training.sharding.kind,
            "gpus": 1 if training.sharding is None else training.sharding.gpus,
        },
        "loss": loss,
        "steps": steps,
        "smaller_steps": smaller,
        "note": f"A step fits if {context} MiB are left for the CUDA context. Gaps between tensors: see {page}.",
    }


def _find_smaller(measured: TrainingMemory, variant: Variant, seq_len: int, memory: int) -> dict[str, dict[str, Any]]:
    """Return the memory of a step with adapters and of a step on several GPUs, by their options."""
    from flce.huggingface.estimate.language_model import AdapterError, Lora
    from flce.huggingface.estimate.training_memory import Sharding, StepError, TrainingMemory

    training, found = measured.training, {}
    lora = training.lora or Lora(16)
    changes: dict[str, dict[str, Any]] = {f"--lora {lora.rank}": {"lora": lora}}
    changes[f"--lora {lora.rank} --load-in-4bit"] = {"lora": lora, "load_in_4bit": True}
    changes["--gpus 8 --sharding fsdp"] = {"sharding": Sharding("fsdp", 8)}
    for options, change in changes.items():
        other = replace(training, **change)
        # PEFT may be missing, or have no default layers for the model.
        with contextlib.suppress(AdapterError, StepError, ModuleNotFoundError):
            if other != training:
                step = TrainingMemory(measured.config, other, measured.device).step(seq_len, variant)
                found[options] = {"peak_bytes": step.peak_bytes, "fits": step.fits(memory)}
    return found


# ------------------------------------------------------------------------------------------------------- printing


def _print_loss(console: Console, loss: dict[str, Any]) -> None:
    head = Column("memory without\ninputs and gradients", justify="right", no_wrap=True)
    divided = f", the head divided over {loss['shards']} processes" if loss["shards"] else ""
    table = Table("", head, title=f"The loss of {loss['tokens']:,} tokens{divided}", title_justify="left")
    table.add_row("stock", size_text(loss["stock_bytes"]))
    table.add_row("flce", size_text(loss["flce_bytes"]))
    print_table(console, table)


def _print_steps(console: Console, result: dict[str, Any]) -> None:
    from flce.engine.case import dtype_text

    steps, training, model = result["steps"], result["training"], result["model"]
    precision = dtype_text(training["dtype"])
    precision += f", autocast to {dtype_text(training['autocast'])}" if training["autocast"] else ""
    if training["load_in_4bit"]:
        precision = f"4 bits and {precision}"
    if training["lora"]:
        precision += f", LoRA of rank {training['lora']['rank']} ({training['trained_parameters']:,} parameters)"
    batch = f"{training['batch_size']} x {training['sequence_length']:,} tokens"
    if training["sharding"]:
        batch += f" on each of {training['gpus']} GPUs, {training['sharding']}"
    about = f"{model['class']}, {model['parameters']:,} parameters in {precision}, {training['optimizer']}, {batch}"
    console.print(about, soft_wrap=True)
    names = (("stock", "patched")[step["patched"]] + ",\ncheckpointing" * step["checkpointing"] for step in steps)
    columns = (Column(name, justify="right", no_wrap=True) for name in names)
    table = Table("", *columns, title="A training step, at its peak", title_justify="left")
    table.add_row("peak", *(size_text(step["peak_bytes"]) for step in steps))
    for part in steps[0]["parts"]:
        sizes = [step["parts"][part] for step in steps]
        if part != "unsharded" or any(sizes):
            table.add_row(f"  {part}", *map(size_text, sizes))
    table.add_row("fits", *("yes" if step["fits"] else "no" for step in steps))
    print_table(console, table)
    if not any(step["fits"] for step in steps):
        needed = max(sum(step["parts"][part] for part in ("weights", "gradients", "optimizer")) for step in steps)
        console.print(f"No step fits: weights, gradients and optimizer alone need {size_text(needed)}. A patched step:")
    for options, each in result["smaller_steps"].items():
        fits = "which fits" if each["fits"] else "which does not fit"
        console.print(f"  {size_text(each['peak_bytes'])} with {options}, {fits}", soft_wrap=True)
    if any(step["patched"] and not step["fused"] for step in steps):
        console.print("flce cannot fuse the loss of this model: flce.report(model) has the reason.", soft_wrap=True)
    console.print(result["note"], soft_wrap=True)
