"""QLoRA with flce: LoRA adapters on a model in 4 bits, with Transformers' `Trainer` and a callback.

    python integrations/qlora.py
    python integrations/qlora.py --adapt-head

bitsandbytes does not quantize the head, so the head can be patched. An adapter on the head is fused with the head:
neither computes all logits in memory.

The script trains the same small model with and without the callback, and ends with status 1 if the losses differ.
"""

from __future__ import annotations

import tempfile
from typing import Annotated, Any

import typer

from demo import Curve, compare_runs, examples, has_gpu, need_packages, record_curve, trainer_settings
from flce.testing import tiny_model


def quantized_model(adapt_head: bool) -> Any:
    """Return the tiny model in 4 bits, loaded from files, with adapters."""
    # These imports take seconds. They are here so that --help is fast.
    import torch
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    with tempfile.TemporaryDirectory() as folder:
        tiny_model().save_pretrained(folder)
        base = AutoModelForCausalLM.from_pretrained(
            folder,
            quantization_config=BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=torch.float32,
            ),
            device_map={"": 0 if has_gpu() else "cpu"},
        )
    base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    torch.manual_seed(0)
    return get_peft_model(
        base,
        LoraConfig(
            target_modules=[*layers, "lm_head"] if adapt_head else layers, lora_dropout=0.0, task_type="CAUSAL_LM"
        ),
    )


def create_trainer(patched: bool, folder: str, *, steps: int, model: Any, **arguments: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    from flce.huggingface import FlceCallback

    return Trainer(
        model=model,
        args=TrainingArguments(**{**trainer_settings(folder, steps), **arguments}),
        train_dataset=examples(4 * 50),
        callbacks=[FlceCallback()] if patched else [],  # the only difference
    )


def train(patched: bool, *, adapt_head: bool = False, **arguments: Any) -> Curve:
    return record_curve(create_trainer, patched, model=quantized_model(adapt_head), learning_rate=3e-3, **arguments)


def main(
    steps: Annotated[int, typer.Option(min=1)] = 50,
    adapt_head: Annotated[bool, typer.Option("--adapt-head", help="Also train an adapter on the head.")] = False,
    bf16: Annotated[bool, typer.Option("--bf16", help="Autocast to bfloat16.")] = False,
) -> None:
    """Train LoRA adapters on a model in 4 bits, stock and with FlceCallback, and compare the losses."""
    need_packages("bitsandbytes", "peft")
    status = compare_runs(
        "QLoRA" + " with an adapter on the head" * adapt_head,
        lambda patched: train(patched, steps=steps, adapt_head=adapt_head, bf16=bf16),
        tolerance=1e-2 if bf16 else 1e-5,
    )
    raise typer.Exit(status)


if __name__ == "__main__":
    typer.run(main)
