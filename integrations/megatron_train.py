"""Megatron-Core with flce: `flce.megatron.install()` replaces the loss. Two processes share one model.

    python integrations/megatron_train.py

The head is divided over the processes by classes. flce stores no logits.

The script trains the same small model with Megatron's loss and with flce, and ends with status 1 if the losses differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from demo import Curve, compare_runs, examples, has_gpu, need_packages
from flce.testing import SIZES
from processes import average_over_processes, run_in_two_processes


@contextlib.contextmanager
def prepare_device() -> Iterator[Any]:
    """Yield the device. Without a GPU, replace the functions of CUDA that Megatron calls anyway."""
    import torch
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_cpu import replace_cuda

    if has_gpu():
        model_parallel_cuda_manual_seed(1)
        yield torch.device("cuda", torch.cuda.current_device())
    else:
        with replace_cuda():
            yield torch.device("cpu")


def train(patched: bool, steps: int) -> Curve:
    # These imports take seconds. They are here so that --help is fast.
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    import flce.megatron

    curve = Curve()
    if patched:
        flce.megatron.install()  # the only difference
    with prepare_device() as device:
        torch.manual_seed(0)
        model = GPTModel(
            config=TransformerConfig(
                num_layers=SIZES["num_hidden_layers"],
                hidden_size=SIZES["hidden_size"],
                num_attention_heads=SIZES["num_attention_heads"],
                tensor_model_parallel_size=torch.distributed.get_world_size(),
                hidden_dropout=0.0,
                attention_dropout=0.0,
                use_cpu_initialization=True,
                gradient_accumulation_fusion=False,
            ),
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=SIZES["vocab_size"],
            max_sequence_length=64,
        ).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        rows = examples(4 * steps)
        masked = torch.ones(1, 1, 64, 64, dtype=torch.bool, device=device).triu(1)
        positions = torch.arange(64, device=device).expand(4, 64)
        for step in range(steps):
            ids = torch.stack([row["input_ids"] for row in rows[4 * step : 4 * step + 4]]).to(device)
            per_token = model(ids, positions, masked, labels=ids.roll(-1, 1))
            loss = per_token[:, :-1].mean()
            curve.add(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return average_over_processes(curve)


def run_process(steps: int) -> int:
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    dist.init_process_group("nccl" if has_gpu() else "gloo")
    if has_gpu():
        torch.cuda.set_device(dist.get_rank())
    parallel_state.initialize_model_parallel(dist.get_world_size())
    name = f"Megatron-Core, {dist.get_world_size()} tensor-parallel processes"
    status = compare_runs(name, lambda patched: train(patched, steps))
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return status


def main(steps: Annotated[int, typer.Option(min=1)] = 50) -> None:
    """Train with Megatron-Core in two processes, with its loss and with flce's, and compare the losses."""
    need_packages("megatron-core")
    raise typer.Exit(run_in_two_processes(run_process, steps))


if __name__ == "__main__":
    typer.run(main)
