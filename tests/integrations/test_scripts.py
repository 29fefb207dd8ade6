"""The scripts of `integrations/`, and the options of the libraries that they train with.

`make recipes` runs the scripts with 50 steps each (`RECIPE_STEPS`), and shows what they say.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("typer", reason="the scripts' command line")
pytest.importorskip("transformers")

import typer
from typer.testing import CliRunner, Result

import demo
import flce
import processes
from flce.testing.models import VOCAB_SIZE
from tests.distributed.pair import World

INTEGRATIONS = Path(__file__).parents[2] / "integrations"
STEPS = os.environ.get("RECIPE_STEPS", "4")
GPU = pytest.mark.gpu

# The packages that each needs.
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
IN_TWO_PROCESSES = ("accelerate_fsdp2", "deepspeed_zero3")
# Each wants an environment of its own (docs/trainers.md has the versions), and changes Transformers as it is imported.
ALONE = ("axolotl_train", "megatron_train", "swift_train", "torchtune_recipe")
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


def needs(script: str) -> Any:
    """The module of a script whose libraries are there."""
    for package in SCRIPTS[script]:
        if importlib.util.find_spec(package) is None:
            where = "see docs/trainers.md" if script in ALONE else "it is in the extra `trainers`"
            pytest.skip(f"{package} is not installed: {where}")
    if script in IN_TWO_PROCESSES and not torch.distributed.is_available():
        pytest.skip("PyTorch without torch.distributed")
    return importlib.import_module(script)


def invoke(module: Any, *arguments: str) -> Result:
    """Its command, in this process: to import the libraries takes longer than to train."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(module.main)
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def launched(script: str, *arguments: str) -> tuple[int, str]:
    """In a process that stands for one of torchrun's: the exit status and what was said."""
    done = invoke(importlib.import_module(script), *arguments)
    return done.exit_code, done.output


def in_two_processes(script: str, *arguments: str) -> str:
    """What both say. They are forked from one that has the libraries."""
    world = World(2)
    try:
        ends = world.run(launched, script, *arguments)
    finally:
        world.close()
    assert [status for status, _ in ends] == [0, 0], ends
    return "".join(said for _, said in ends)


@pytest.mark.usefixtures("fresh_accelerator")
@pytest.mark.parametrize(
    "script, options",
    [*RUNS, *(pytest.param(*run, marks=GPU) for run in RUNS_ON_GPUS)],
    ids="".join,
)
def test_the_script(script: str, options: list[str], run_script: Any) -> None:
    """Losses are stock's, and fused where they can be: else the script ends with status 1."""
    module = needs(script)
    if script in ALONE:
        said = run_script(f"{script}.py", f"--steps={STEPS}", *options)
    elif script in IN_TWO_PROCESSES:  # they print themselves; the first speaks
        on_gpus = (script, options) in RUNS_ON_GPUS
        if on_gpus and torch.cuda.device_count() < 2:
            pytest.skip("needs two CUDA devices")
        if torch.cuda.is_available():
            said = run_script(f"{script}.py", f"--steps={STEPS}", *options, gpu="0,1" if on_gpus else "")
        else:
            said = in_two_processes(script, f"--steps={STEPS}", *options)
    else:
        done = invoke(module, f"--steps={STEPS}", *options)
        assert done.exit_code == 0, done.output
        said = done.stdout
    print(said)  # for `make recipes`
    assert said.count("The loss curves agree") == 1


def test_a_missing_package_is_why_a_script_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    demo.need("pytest")
    with pytest.raises(typer.Exit) as refusal:
        demo.need("pytest", "no-such-package")
    assert refusal.value.exit_code == 2
    assert "cannot run here: no-such-package is not installed" in capsys.readouterr().err


@pytest.mark.usefixtures("fail_on_materialize")
def test_an_own_loss_of_a_model_in_4_bits_is_fused() -> None:
    model = flce.patch_model(needs("qlora").quantized_model(adapt_head=True)).train()
    rows = torch.stack([row["input_ids"] for row in demo.examples(2)]).to(model.device)
    loss = F.cross_entropy(model(input_ids=rows).logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
    assert demo.is_fused(loss)


def test_a_head_in_4_bits_is_refused() -> None:
    model = needs("qlora").quantized_model(adapt_head=False).get_base_model()
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
    assert demo.compare("made up", curves.__getitem__) == status
    assert ("The loss curves agree." in capsys.readouterr().out) == (status == 0)


# Runs scripts with an option, and says how each ended and which of the slow libraries have been imported by then.
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
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, option, *(str(INTEGRATIONS / f"{script}.py") for script in SCRIPTS)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(INTEGRATIONS.parent), str(INTEGRATIONS)])},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    ends = [line for line in done.stdout.splitlines() if line.startswith("status")]
    assert ends == [f"status {status} imported []"] * len(SCRIPTS), done.stdout + done.stderr
    assert (done.stderr if status else done.stdout).count("steps") >= len(SCRIPTS)


# The second process has another loss and was not fused, and ends with the larger status.
TWO_PROCESSES = """
import os, sys

from demo import Curve
from processes import in_two_processes, of_all_processes


def in_each_process(status):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    curve = of_all_processes(Curve([float(rank), 4.0], [True, rank == 0]))
    dist.destroy_process_group()
    assert curve == Curve([0.5, 4.0], [True, False]), curve
    return status + rank


if __name__ == "__main__":
    sys.exit(in_two_processes(in_each_process, 3))
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")
def test_two_processes_have_one_curve_and_the_worse_status(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TWO_PROCESSES)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(INTEGRATIONS), *sys.path])}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 4, done.stderr


def test_a_process_of_a_launcher_starts_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert processes.in_two_processes(max, 1, 2) == 2
