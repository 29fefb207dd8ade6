"""Tests of wrong usage: exit status 2, a sentence on stderr that names the option, and an empty stdout."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", reason="the command line")
pytest.importorskip("rich", reason="the command line")

from typer.testing import CliRunner

from flce.__main__ import main
from flce.tools.cli import app
from flce.tools.cli.plan import Optimizer, ShardingKind, plan
from tests.processes import run_python

LARGE, MODEL = ("plan", "--shape", "8192,4096,128256"), ("plan", "--model")


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (("check", "--device", "toaster"), "there is no device 'toaster' here: give one of"),
        (("plan",), "give either --model or --shape"),
        ((*LARGE, "--model", "."), "give either --model or --shape"),
        (("plan", "--shape", "8192,4096"), "expected N,H,V as 3 positive numbers"),
        ((*LARGE, "--gpu-memory", "80"), "expected a size such as 80GiB, 80GB or 256MiB, got '80'"),
        ((*LARGE, "--budget", "1MiB"), "'--budget': is too small for this loss: give at least 1.29MiB"),
        ((*LARGE, "--shards", "1000000"), "'--shards': expected at most 128,256, the classes of the head, got"),
        ((*MODEL, ".", "--lora-targets", "all-linear"), "'--lora-targets': needs --lora: give a rank"),
        ((*MODEL, ".", "--load-in-4bit"), "'--load-in-4bit': needs --lora: give a rank"),
        ((*MODEL, "{folder}/small.json", "--lora", "8", "--lora-targets", "q_proj,no"), "a llama has no layer 'no':"),
        ((*MODEL, "{folder}/moe.json", "--lora", "8", "--lora-targets", "all-linear"), "a mixtral has experts, whose"),
        ((*MODEL, "{folder}/moe.json", "--lora", "8"), "PEFT has no default layers for a mixtral: give all-linear"),
        ((*MODEL, "{folder}/gpt2.json", "--seq-len", "2048"), "'--seq-len': a GPT2LMHeadModel has 1,024 positions"),
        ((*LARGE, "--optimizer", "lion"), "'lion' is not one of"),
        ((*LARGE, "--dtype", "int8"), "'int8' is not one of"),
        ((*LARGE, "--autocast", "bfloat16"), "needs --dtype float32, got --dtype bfloat16"),
        ((*LARGE, "--gpu-memory", "24GB"), "'--device-kind': is needed with --gpu-memory 24GB: give one of RTX-3090,"),
        ((*LARGE, "--device-kind", "A100"), "device_kind must be one of A100-40GB, A100-80GB, got 'A100'"),
        ((*LARGE, "--device-kind", "sm_80"), "is needed: flce has no memory size for a sm_80"),
        ((*LARGE, "--device-kind", "abacus"), "device_kind must be one of V100, V100-32GB,"),
        ((*LARGE, "--seq-len", "64"), "--seq-len': needs --model: --shape plans the loss alone"),
        ((*MODEL, ".", "--gpus", "4"), "give both --gpus and --sharding, or neither"),
        ((*MODEL, ".", "--shards", "2"), "'--shards': needs --shape: it plans the loss of a divided head"),
        ((*LARGE, "--seq-len", "-5"), "'--seq-len': expected an integer of at least 1, got '-5'"),
        (("check", "--processes", "1"), "'--processes': expected an integer of at least 2, got '1'"),
        (
            (*MODEL, "{folder}/small.json", "--seq-len", "999999999999"),
            "expected at most 67,108,864 tokens in a step, got",
        ),
        ((*MODEL, "{folder}/small.json", "--budget", "1KiB"), "'--budget': is too small for this loss: give"),
        ((*MODEL, "nowhere"), "nowhere does not exist, and the cache of Transformers has no config of this name"),
        ((*MODEL, "{folder}"), "has no config.json"),
        ((*MODEL, "{folder}/broken.json"), "broken.json is not a config that Transformers can read"),
        ((*MODEL, "{folder}/unknown.json"), "model type `abacus`"),
        ((*MODEL, "{folder}/remote.json"), "needs Python code from its repository, which flce plan does not run"),
        ((*MODEL, "{folder}/none.json"), "--model': the head has V = 0 and H = 64"),
        ((*MODEL, "{folder}/other.json"), "Transformers has no class with a language-model head for a vit"),
        (("conjure",), "No such command 'conjure'"),
        (("info", "--jason"), "No such option: --jason"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_usage(arguments: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    if "--model" in arguments:
        pytest.importorskip("transformers", minversion="5")
    for name, text in {
        "broken": "{",
        "unknown": '{"model_type": "abacus"}',
        "other": '{"model_type": "vit"}',
        "gpt2": '{"model_type": "gpt2", "n_layer": 1}',
        "moe": '{"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}',
        "small": '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1}',
        "remote": '{"model_type": "abacus", "auto_map": {"AutoConfig": "abacus.Abacus"}}',
        "none": '{"model_type": "llama", "vocab_size": 0, "hidden_size": 64, "num_hidden_layers": 1}',
    }.items():
        (tmp_path / f"{name}.json").write_text(text)
    words = [argument.replace("{folder}", str(tmp_path)) for argument in arguments]
    output = CliRunner(env={"COLUMNS": "300", "TERM": "dumb"}).invoke(app, words)
    assert output.exit_code == 2, output.output
    assert sentence in " ".join(output.stderr.replace("│", " ").split())
    assert output.stdout == ""


def test_choices_equal_the_tables() -> None:
    """Check the copies of two tables. The command line does not import the tables, so that `--help` is fast."""
    memory = pytest.importorskip("flce.huggingface.estimate.training_memory", exc_type=ImportError)
    assert [optimizer.value for optimizer in Optimizer] == list(memory.OPTIMIZERS)
    assert tuple(kind.value for kind in ShardingKind) == memory.SHARDING_KINDS


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt  # a process in the background may ignore the signal

    monkeypatch.delattr(signal, "SIGPIPE")
    monkeypatch.setattr("flce.planning.plan.resolve_device", interrupt)
    monkeypatch.setattr(sys, "argv", ["flce", *LARGE])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


def test_a_narrow_terminal_and_a_closed_pipe() -> None:
    """Check that help of 40 columns has the names of all options, and that a closed pipe ends a command by SIGPIPE."""
    command = ["-m", "flce", "plan", "--help"]
    shown = run_python(*command, env={"COLUMNS": "40"}).stdout
    options = {f"--{name.replace('_', '-')}" for name in inspect.signature(plan).parameters} - {"--context"}
    assert options <= {word.partition("/")[0] for word in shown.split()}
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        done = subprocess.run([sys.executable, *command], stdout=closed, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")
