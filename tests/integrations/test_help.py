"""`--help`, and the answer to a wrong option, do not wait for PyTorch and the trainers to be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the scripts' command line")

ROOT = Path(__file__).parents[2]
INTEGRATIONS = ROOT / "integrations"
SCRIPTS = [
    "accelerate_fsdp2",
    "accelerate_loop",
    "deepspeed_zero3",
    "liger_layers",
    "lightning_module",
    "qlora",
    "trainer",
    "trl_dpo",
    "trl_sft",
    "vision_language",
]

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
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(INTEGRATIONS)])}
    runs = {
        (script, option): subprocess.Popen(
            [sys.executable, "-c", PROGRAM, INTEGRATIONS / f"{script}.py", option],
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
