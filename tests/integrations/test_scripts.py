"""Tests of the scripts of `integrations/`, and of options of the libraries that the scripts train with.

`make recipes` runs the scripts with 50 steps each (`RECIPE_STEPS`) and shows their output.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("typer", reason="the scripts' command line")
pytest.importorskip("transformers")

import typer
from typer.testing import CliRunner, Result

import demo
import flce
from flce.testing import VOCAB_SIZE
from tests.processes import World, run_python

INTEGRATIONS = Path(__file__).parents[2] / "integrations"
STEPS = os.environ.get("RECIPE_STEPS", "4")
GPU = pytest.mark.gpu

# The packages that each script needs.
SCRIPTS: dict[str, list[str]] = {
    "accelerate_fsdp2": ["accelerate"],
    "axolotl_train": ["axolotl"],
    "deepspeed_zero3": ["deepspeed"],
    "megatron_train": ["megatron"],
    "qlora": ["accelerate", "bitsandbytes", "peft"],
    "swift_train": ["swift"],
    "torchtune_recipe": ["torchtune"],
    "trl_train": ["trl", "peft"],
}
IN_TWO_PROCESSES = ("accelerate_fsdp2", "deepspeed_zero3", "megatron_train")
# Each library needs a separate environment (versions: docs/trainers.md), and changes Transformers at its import.
ALONE = ("axolotl_train", "swift_train", "torchtune_recipe")
RUNS: list[tuple[str, list[str]]] = [
    ("accelerate_fsdp2", []),
    ("axolotl_train", []),
    ("axolotl_train", ["--lora"]),
    *(("deepspeed_zero3", [f"--by={by}"]) for by in ("engine", "accelerate", "trainer")),
    ("megatron_train", []),
    ("qlora", ["--adapt-head"]),
    ("swift_train", []),
    ("swift_train", ["--lora"]),
    ("torchtune_recipe", []),
    ("torchtune_recipe", ["--tied"]),
    ("trl_train", []),
    ("trl_train", ["--lora"]),
    ("trl_train", ["--by=dpo"]),
]
RUNS_ON_GPUS: list[tuple[str, list[str]]] = [
    ("accelerate_fsdp2", ["--mixed-precision=no"]),
    ("accelerate_fsdp2", ["--mixed-precision=bf16"]),
    ("deepspeed_zero3", ["--stage=2"]),
    ("deepspeed_zero3", ["--stage=3"]),
    ("qlora", []),
    ("qlora", ["--bf16"]),
]


def import_script(script: str) -> Any:
    """Import a script, or skip the test if a library of the script is missing."""
    for package in SCRIPTS[script]:
        if importlib.util.find_spec(package) is None:
            source = "see docs/trainers.md" if script in ALONE else "it is in the extra `trainers`"
            pytest.skip(f"{package} is not installed: {source}")
    if script in IN_TWO_PROCESSES and not torch.distributed.is_available():
        pytest.skip("PyTorch without torch.distributed")
    return importlib.import_module(script)


def invoke(module: Any, *arguments: str) -> Result:
    """Run the script's command in this process: the imports of the libraries take longer than the training."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(module.main)
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def run_rank(script: str, *arguments: str) -> tuple[int, str]:
    """Run a script in a process with the environment of torchrun. Return the exit status and the output."""
    with mock.patch("torch.distributed.init_process_group"):  # the process has a group
        done = invoke(importlib.import_module(script), *arguments)
    return done.exit_code, done.output


def run_forked(script: str, *arguments: str) -> str:
    """Run a script in two processes, forked from a process that has imported the libraries. Return the output."""
    with contextlib.closing(World(2)) as world:
        ends = world.run(run_rank, script, *arguments)
    assert [status for status, _ in ends] == [0, 0], ends
    return "".join(output for _, output in ends)


@pytest.mark.usefixtures("fresh_accelerator")
@pytest.mark.parametrize(
    "script, options", [*RUNS, *(pytest.param(*run, marks=GPU) for run in RUNS_ON_GPUS)], ids="".join
)
def test_the_script(script: str, options: list[str], run_script: Any) -> None:
    """Check that a script ends with status 0: losses are equal to stock's losses, and fused if possible."""
    module = import_script(script)
    if script in ALONE:
        output = run_script(f"{script}.py", f"--steps={STEPS}", *options)
    elif script in IN_TWO_PROCESSES:  # only the first process prints
        on_gpus = (script, options) in RUNS_ON_GPUS
        if on_gpus and torch.cuda.device_count() < 2:
            pytest.skip("needs two CUDA devices")
        if torch.cuda.is_available():
            output = run_script(f"{script}.py", f"--steps={STEPS}", *options, gpu="0,1" if on_gpus else "")
        else:
            output = run_forked(script, f"--steps={STEPS}", *options)
    else:
        done = invoke(module, f"--steps={STEPS}", *options)
        assert done.exit_code == 0, done.output
        output = done.stdout
    print(output)  # for `make recipes`
    assert output.count("The loss curves agree") == 1


def test_a_missing_package(capsys: pytest.CaptureFixture[str]) -> None:
    demo.need_packages("pytest")
    with pytest.raises(typer.Exit) as refusal:
        demo.need_packages("pytest", "no-such-package")
    assert refusal.value.exit_code == 2
    assert "cannot run here: no-such-package is not installed" in capsys.readouterr().err


@pytest.mark.usefixtures("fail_on_materialize")
def test_an_own_loss_of_a_model_in_4_bits_is_fused() -> None:
    model = flce.patch_model(import_script("qlora").quantized_model(adapt_head=True)).train()
    rows = torch.stack([row["input_ids"] for row in demo.examples(2)]).to(model.device)
    loss = F.cross_entropy(model(input_ids=rows).logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
    assert demo.is_fused(loss)


def test_a_head_in_4_bits_is_refused() -> None:
    model = import_script("qlora").quantized_model(adapt_head=False).get_base_model()
    layer = model.model.layers[0].mlp.up_proj.base_layer
    assert type(layer).__name__ == "Linear4bit"
    assert type(model.lm_head).__name__ == "Linear"
    assert not model.lm_head.weight.requires_grad
    model.set_output_embeddings(type(layer)(64, VOCAB_SIZE, bias=False).to(model.device))
    with pytest.raises(TypeError, match="quantised head"):
        flce.patch_model(model)


@pytest.mark.parametrize("last, fused, status", [(2.0, True, 0), (2.1, True, 1), (math.nan, True, 1), (2.0, False, 1)])
def test_a_difference_is_found(last: float, fused: bool, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    curves = {False: demo.Curve([1.0, 2.0], [False] * 2), True: demo.Curve([1.0, last], [fused, True])}
    assert demo.compare_runs("a trainer", curves.__getitem__) == status
    assert ("The loss curves agree." in capsys.readouterr().out) == (status == 0)


# Runs scripts with an option. Prints the exit status of each script and the slow libraries that are imported by then.
PROGRAM = """
import runpy, sys

slow = "accelerate axolotl bitsandbytes datasets deepspeed lightning llamafactory matplotlib megatron numpy omegaconf "
slow += "peft PIL swift tokenizers torch torchtune trl"
option, *files = sys.argv[1:]
for file in files:
    sys.argv[:] = [file, option]
    try:
        runpy.run_path(file, run_name="__main__")
    except SystemExit as end:
        print("status", end.code, "imported", sorted(sys.modules.keys() & {*slow.split(), "transformers"}))
"""


@pytest.mark.parametrize("option, status", [("--help", 0), ("--steps=0", 2)])
def test_help_and_a_wrong_option_import_nothing_slow(option: str, status: int) -> None:
    path = os.pathsep.join([str(INTEGRATIONS.parent), str(INTEGRATIONS)])
    scripts = [INTEGRATIONS / f"{script}.py" for script in SCRIPTS]
    done = run_python("-c", PROGRAM, option, *scripts, env={"PYTHONPATH": path})
    ends = [line for line in done.stdout.splitlines() if line.startswith("status")]
    assert ends == [f"status {status} imported []"] * len(SCRIPTS), done.stdout + done.stderr
    assert (done.stderr if status else done.stdout).count("steps") >= len(SCRIPTS)
