"""The command ``flce plan``: the memory of a training step on any GPU, and the longest sequence that fits."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import asdict
from enum import Enum
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table

from flce.core.sizes import locate_page, parse_bytes, parse_sizes, size_text
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

    from flce.huggingface.estimate.training_memory import Training
    from flce.planning.device_kinds import DescribedDevice

WeightDtype = Enum("WeightDtype", {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32"})
_KEYS = ("adamw", "adamw-foreach", "adamw-8bit", "sgd", "sgd-momentum", "none")
Optimizer = Enum("Optimizer", {key: key for key in _KEYS})  # type: ignore[misc]
"""The keys of `flce.huggingface.estimate.training_memory.OPTIMIZERS`."""
# `flce.huggingface.estimate.sharding.SHARDING_KINDS`.
ShardingKind = Enum("ShardingKind", {"fsdp": "fsdp", "zero3": "zero3"})
USUAL_LENGTH = 4096
NOTE = (
    "A step has text alone; an encoder and a decoder get a sequence of this length each. "
    "The peak is the largest number of bytes that a step allocates at one time: weights + gradients + the optimizer's "
    "state + activations + loss + temporary. Unsharded weights are gathered from other GPUs. Activations are stored "
    "for backward: of all layers without checkpointing; the inputs of all layers and one layer's activations with it. "
    "They were counted while the model's code ran on tensors without memory, not estimated. Temporary includes "
    "{libraries} MiB of cuBLAS. A step fits if it leaves {context} MiB for the CUDA context. Gaps between tensors need "
    "further memory: see {page}."
)
# Options of a training step. The plan of a loss alone does not have them.
STEP_OPTIONS = (
    *("seq_len", "batch_size", "optimizer", "checkpointing", "accumulation", "gpus", "sharding"),
    *("lora", "lora_targets", "load_in_4bit"),
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
    device_kind: Annotated[str, typer.Option(help="Kind of the GPU, such as H100 or RTX-4090, or sm_90.")] = "H100",
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
    frozen_head: Annotated[bool, typer.Option("--frozen-head", help="The output embedding is not trained.")] = False,
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
    json: Json = False,
) -> None:
    """Print the memory of a training step, stock and patched, and the longest sequence that fits. Needs no GPU.

    Example: flce plan --model ./Qwen3-0.6B --seq-len 8192 --batch-size 4 --gpu-memory 80GiB
    """
    import torch

    import flce
    from flce.huggingface.estimate.language_model import Lora
    from flce.huggingface.estimate.sharding import Sharding
    from flce.huggingface.estimate.training_memory import Training
    from flce.planning.device_kinds import kind_text, resolve_device

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
    weights: torch.dtype = getattr(torch, dtype.value)
    products: torch.dtype | None = None if autocast is None else getattr(torch, autocast.value)
    memory = parse_option("--gpu-memory", parse_bytes, gpu_memory) if gpu_memory is not None else None
    gpu = parse_option("--device-kind", resolve_device, torch.device("cuda"), device_kind, memory)
    memory = gpu.device.memory
    if memory is None:
        raise usage_error("--gpu-memory", f"is needed: flce has no memory size for a {device_kind}")
    budget_bytes = parse_option("--budget", parse_bytes, budget) if budget is not None else None
    options = flce.ChunkOptions(max_workspace_bytes=budget_bytes) if budget_bytes is not None else None
    plan_loss = functools.partial(
        _plan_loss, dtype=products or weights, device_kind=device_kind, device_memory=memory, options=options
    )
    result: dict[str, Any] = {"device": {"kind": kind_text(torch.device("cuda"), device_kind), "memory_bytes": memory}}
    if shape is not None:
        sizes = parse_option("--shape", parse_sizes, shape)
        result["loss"] = plan_loss(sizes, weight_grad=not frozen_head, shards=shards)
    else:
        assert model is not None
        step_settings = optimizer.value, frozen_head, accumulation, options
        divided = None if sharding is None or gpus is None else Sharding(sharding.value, gpus)
        adapters = None if lora is None else Lora(lora, lora_targets)
        training = Training(batch_size, weights, products, *step_settings, divided, adapters, load_in_4bit)
        result |= _plan_steps(model, seq_len, training, gpu, memory, plan_loss, checkpointing)
    if json:
        print_json(result)
    else:
        _print_plan(result)
    if "steps" in result and not any(step["fits"] for step in result["steps"]):
        raise typer.Exit(1)


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
        "collectives": [asdict(each) for each in planned.collectives],
        "plan": str(planned),
    }


def _plan_steps(
    model: str,
    seq_len: int | None,
    training: Training,
    device: DescribedDevice,
    memory: int,
    plan_loss: Callable[..., dict[str, Any]],
    checkpointing: bool | None,
) -> dict[str, Any]:
    """Return the memory of a step of the model in each variant, and the longest sequences."""
    if importlib.util.find_spec("transformers") is None or metadata.version("transformers").startswith("4."):
        missing = "needs Transformers 5: pip install -U transformers, or give --shape N,H,V instead of a model"
        raise usage_error("--model", missing)
    from flce.huggingface.estimate import training_memory
    from flce.huggingface.estimate.language_model import AdapterError, load_config
    from flce.huggingface.estimate.training_memory import MAX_TOKENS, StepError

    try:
        measured = parse_option("--model", lambda: training_memory.TrainingMemory(load_config(model), training, device))
    except AdapterError as error:
        raise usage_error("--lora, --lora-targets", f"{error}") from None
    variants = [each for each in measured.variants if checkpointing in (None, each.checkpointing)]
    kind = type(measured.model).__name__
    if not variants:
        raise usage_error("--checkpointing", f"a {kind} has no gradient checkpointing")
    if seq_len is None:
        seq_len = min(USUAL_LENGTH, measured.positions or USUAL_LENGTH)
    if seq_len * training.batch_size > MAX_TOKENS:
        num_tokens = seq_len * training.batch_size
        raise usage_error("--seq-len", f"expected at most {MAX_TOKENS:,} tokens in a step, got {num_tokens:,}")
    vocab, hidden = measured.head_shape
    weight_grad = not training.frozen_head and training.lora is None
    loss = plan_loss((training.batch_size * seq_len, hidden, vocab), weight_grad=weight_grad)
    steps = []
    with stderr().status("") as status:
        for variant in variants:
            status.update(f"steps of the model, {variant}")
            try:
                step = measured.step(seq_len, variant)
                longest = measured.find_longest(variant, memory, start=seq_len)
            except StepError as error:
                too_long = measured.positions is not None and seq_len > measured.positions
                raise usage_error("--seq-len" if too_long else "--model", f"{error}") from None
            length = {"longest_sequence": longest.tokens, "longest_obstacle": longest.obstacle}
            steps.append({**asdict(variant), **asdict(step), "fits": step.fits(memory), **length})
    return {
        "model": {
            "type": measured.config.model_type,
            "class": kind,
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
        "note": NOTE.format(
            libraries=training_memory.LIBRARY_BYTES >> 20,
            context=training_memory.CONTEXT_BYTES >> 20,
            page=locate_page("memory.md"),
        ),
    }


# ------------------------------------------------------------------------------------------------------- printing


def _print_plan(result: dict[str, Any]) -> None:
    from flce.engine.case import dtype_text

    console, loss, device = stdout(), result["loss"], result["device"]
    console.print(f"{device['kind']}, {size_text(device['memory_bytes'])}")
    head = Column("memory without\ninputs and gradients", justify="right", no_wrap=True)
    divided = f", the head divided over {loss['shards']} processes" if loss["shards"] else ""
    table = Table("", head, title=f"The loss of {loss['tokens']:,} tokens{divided}", title_justify="left")
    table.add_row("stock", size_text(loss["stock_bytes"]))
    table.add_row("flce", size_text(loss["flce_bytes"]))
    print_table(console, table)
    console.print(loss["plan"], soft_wrap=True)
    if "steps" not in result:
        return
    training = result["training"]
    precision = dtype_text(training["dtype"])
    precision += f", autocast to {dtype_text(training['autocast'])}" if training["autocast"] else ""
    if training["load_in_4bit"]:
        precision = f"4 bits and {precision}"
    if training["lora"]:
        precision += f", LoRA of rank {training['lora']['rank']} ({training['trained_parameters']:,} parameters)"
    batch = f"{training['batch_size']} x {training['sequence_length']:,} tokens"
    if training["sharding"]:
        batch += f" on each of {training['gpus']} GPUs, {training['sharding']}"
    model = result["model"]
    console.print(
        f"\n{model['class']}, {model['parameters']:,} parameters in {precision}, {training['optimizer']}, {batch}",
        soft_wrap=True,
    )
    print_table(console, _table(result["steps"], training["batch_size"]))
    for obstacle in dict.fromkeys(step["longest_obstacle"] for step in result["steps"] if step["longest_obstacle"]):
        console.print(f"Why no sequence is longer: {obstacle.rstrip('.')}.", soft_wrap=True)
    longest, positions = max(step["longest_sequence"] for step in result["steps"]), model["positions"]
    if positions is not None and max(longest, training["sequence_length"]) > positions:
        sentence = f"The config has {positions:,} positions: longer sequences fit, but the model does not support them."
        console.print(sentence, soft_wrap=True)
    if any(step["patched"] and not step["fused"] for step in result["steps"]):
        console.print("flce cannot fuse the loss of this model: flce.report(model) has the reason.", soft_wrap=True)
    console.print(result["note"], soft_wrap=True)


def _table(steps: list[dict[str, Any]], batch_size: int) -> Table:
    heads = [
        ("patched" if step["patched"] else "stock") + (",\ncheckpointing" if step["checkpointing"] else "")
        for step in steps
    ]
    columns = (Column(head, justify="right", no_wrap=True) for head in heads)
    table = Table("", *columns, title="A training step", title_justify="left")
    table.add_row("peak", *(size_text(step["peak_bytes"]) for step in steps))
    for part in steps[0]["parts"]:
        sizes = [step["parts"][part] for step in steps]
        if part != "unsharded" or any(sizes):
            table.add_row(f"  {part}", *map(size_text, sizes))
    table.add_row("fits", *("yes" if step["fits"] else "no" for step in steps))
    which = "longest sequence" if batch_size == 1 else f"longest of {batch_size:,} sequences"
    table.add_row(f"{which}, tokens", *(f"{step['longest_sequence']:,}" for step in steps))
    return table
