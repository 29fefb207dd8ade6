"""The scripts of `integrations/`, run as a user runs them, and the options of the libraries that they train with."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the scripts' command line")
pytest.importorskip("transformers")

import compare

ROOT = Path(__file__).parents[2]

# What each needs, and what it says of 8 steps beside that the losses agree. The first of two processes speaks.
SCRIPTS: dict[str, tuple[list[str], list[str]]] = {
    "accelerate_fsdp2": (["accelerate"], ["FSDP2 in 2 processes: 8 steps"]),
    "accelerate_loop": (["accelerate"], ["8 steps"]),
    "deepspeed_zero3": (["deepspeed"], ["ZeRO-3 in 2 processes: 8 steps", "fused in 0"]),
    "liger_layers": (["accelerate", "liger_kernel"], ["fused in 8"]),
    "lightning_module": (["lightning"], ["8 steps"]),
    "qlora": (["accelerate", "bitsandbytes", "peft"], ["8 steps"]),
    "trainer": (["accelerate"], ["8 steps"]),
    "trl_dpo": (["trl"], ["8 steps"]),
    "trl_sft": (["trl", "peft"], ["8 steps"]),
    "vision_language": (["PIL"], ["8 steps"]),
}


def needs(script: str) -> Any:
    """The module of a script whose libraries are there."""
    for package in SCRIPTS[script][0]:
        pytest.importorskip(package, reason="it is in the extra `trainers`")
    if script == "vision_language":
        pytest.importorskip("transformers", minversion="5.0")
    if script in ("accelerate_fsdp2", "deepspeed_zero3") and not torch.distributed.is_available():
        pytest.skip("PyTorch without torch.distributed")
    return importlib.import_module(script)


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script != "liger_layers"])
def test_the_script(script, run_script):
    needs(script)
    said = run_script(f"{script}.py", "--steps=8")
    assert "The loss curves agree" in said
    assert all(said.count(part) == 1 for part in SCRIPTS[script][1])


ON_ONE_GPU = [
    ("liger_layers", []),
    ("qlora", []),
    ("qlora", ["--adapt-head"]),
    ("qlora", ["--bf16"]),
    ("trainer", ["--fp16"]),
    ("trainer", ["--bf16"]),
    ("vision_language", []),
]
ON_TWO_GPUS = [
    ("accelerate_fsdp2", ["--mixed-precision=no"]),
    ("accelerate_fsdp2", ["--mixed-precision=bf16"]),
    ("deepspeed_zero3", ["--stage=2"]),
    ("deepspeed_zero3", ["--stage=3"]),
]


@pytest.mark.gpu
@pytest.mark.parametrize("script, options", [*ON_ONE_GPU, *ON_TWO_GPUS])
def test_on_gpus(script, options, run_script):
    needs(script)
    gpu = "0,1" if (script, options) in ON_TWO_GPUS else "0"
    if torch.cuda.device_count() < len(gpu.split(",")):
        pytest.skip("needs two CUDA devices")
    said = run_script(f"{script}.py", "--steps=8", *options, gpu=gpu)
    assert "The loss curves agree" in said
    assert script != "liger_layers" or "fused in 8" in said


@pytest.mark.parametrize(
    "script, arguments, sentence",
    [
        ("liger_layers", [], "cannot run here: Liger's layers are Triton kernels and need a GPU"),
        ("accelerate_fsdp2", ["--mixed-precision=half"], "it is no or bf16"),
        ("accelerate_loop", ["--mixed-precision=half"], "it is no, bf16 or fp16"),
        ("accelerate_loop", ["--mixed-precision=fp16"], "needs a GPU"),
    ],
)
def test_what_a_script_cannot_do(script, arguments, sentence, run_script):
    said = run_script(f"{script}.py", *arguments, status=2)
    assert sentence in " ".join(said.replace("│", " ").split())
    assert "Traceback" not in said


GPU = pytest.mark.gpu


@pytest.mark.parametrize(
    "script, arguments, how",
    [
        ("accelerate_loop", {"gradient_accumulation": 2}, {}),
        ("accelerate_loop", {"mixed_precision": "bf16"}, {"tolerance": 1e-2}),
        pytest.param("accelerate_loop", {"mixed_precision": "fp16"}, {"tolerance": 1e-2}, marks=GPU),
        ("lightning_module", {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "max_epochs": 1}, {}),
        ("lightning_module", {"precision": "bf16-mixed"}, {"tolerance": 1e-2}),
        pytest.param("lightning_module", {"precision": "16-mixed"}, {"tolerance": 1e-2}, marks=GPU),
        ("qlora", {"adapt_head": True}, {}),
        ("trl_dpo", {"precompute_ref_log_probs": True}, {"fused": False}),
        ("trl_sft", {"lora": True}, {}),
        ("trl_sft", {"gradient_accumulation_steps": 2}, {}),
        ("trl_sft", {"packing": True, "packing_strategy": "wrapped"}, {}),
        ("trl_sft", {"gradient_checkpointing": True}, {}),
        ("trl_sft", {"trl_kernel": True}, {"fused": False}),
    ],
    ids=str,
)
def test_same_losses_as_stock(script, arguments, how):
    module = needs(script)
    if script == "accelerate_loop":
        from accelerate.state import AcceleratorState

        # Accelerate keeps what a process began with, and other tests may have begun otherwise.
        AcceleratorState._reset_state(reset_partial_state=True)
    assert compare.compare("", lambda patched: module.train(patched, steps=6, **arguments), **how) == 0


# Runs a script with an option, and says how it ended and which of the slow libraries have been imported by then.
PROGRAM = """
import runpy, sys

try:
    runpy.run_path(sys.argv.pop(1), run_name="__main__")
except SystemExit as end:
    slow = "accelerate bitsandbytes datasets deepspeed lightning matplotlib numpy peft PIL tokenizers torch"
    print("status", end.code, "imported", sorted(sys.modules.keys() & {*slow.split(), "transformers", "trl"}))
"""


def test_help_and_a_wrong_option_import_nothing_slow():
    folder = ROOT / "integrations"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    runs = {
        (script, option): subprocess.Popen(
            [sys.executable, "-c", PROGRAM, folder / f"{script}.py", option],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for script in SCRIPTS
        for option in ("--help", "--steps=0")
    }
    for (script, option), run in runs.items():
        said, errors = run.communicate(timeout=120)
        status = 0 if option == "--help" else 2
        assert said.endswith(f"status {status} imported []\n"), f"{script}.py {option}\n{said}{errors}"
        assert "steps" in (errors if status else said)
