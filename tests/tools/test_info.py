"""``flce`` itself, and ``flce info``."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the command line")
pytest.importorskip("rich", reason="the command line")

import flce
from flce.core.project import COMMAND_LINE
from flce.tools.cli import app
from flce.tools.cli import info as info_command

ROOT = Path(flce.__file__).parents[1]
COMMANDS = sorted(command.callback.__name__ for command in app.app.registered_commands if command.callback)


def run(*arguments: str, code: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """``python -m flce`` with these arguments, in a Python of its own."""
    start = ["-c", code] if code else ["-m", "flce"]
    return subprocess.run(
        [sys.executable, *start, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120", **variables},
        check=False,
        timeout=240,
    )


def test_help_is_quick_and_has_an_example() -> None:
    """Under a second of the processor: PyTorch alone takes more to import. So nothing that is slow is imported."""
    code = """
import sys
sys.argv[0] = "flce"
try:
    __import__("flce.tools.cli").tools.cli.main()
finally:
    print(sorted({"torch", "transformers", "triton", "numpy", "matplotlib"} & set(sys.modules)), file=sys.stderr)
"""
    for arguments in (["--help"], *([command, "--help"] for command in COMMANDS)):
        start = time.perf_counter()
        done = run(*arguments, code=code)
        assert done.returncode == 0, done.stderr
        assert done.stderr.strip().splitlines()[-1] == "[]", arguments
        assert time.perf_counter() - start < 10  # a second on a machine that does nothing else
        assert len(arguments) == 1 or f"flce {arguments[0]}" in done.stdout


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_its_extra(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import flce.tools.cli; flce.tools.cli.main()"
    done = run(code=code)
    assert done.returncode == 2
    assert done.stderr == f"The command line of flce needs {missing}: pip install {COMMAND_LINE}\n"


def test_another_missing_module_is_not_hidden() -> None:
    code = "import sys; sys.modules['flce.tools.cli.info'] = None; import flce.tools.cli; flce.tools.cli.main()"
    done = run(code=code)
    assert done.returncode == 1
    assert "flce.tools.cli.info" in done.stderr


def test_version_and_wrong_usage() -> None:
    assert run("--version").stdout == f"flce {flce.__version__}\n"
    wrong = run("conjure")
    assert wrong.returncode == 2
    assert "conjure" in wrong.stderr
    assert run().returncode == 2  # it shows its help


def test_info() -> None:
    said = run("info")
    assert said.returncode == 0, said.stderr
    assert flce.__version__ in said.stdout
    assert torch.__version__ in said.stdout
    facts = json.loads(run("info", "--json", FLCE_BACKEND="torch").stdout)
    assert facts["packages"]["torch"] == torch.__version__
    cpu = facts["devices"][-1]
    assert (cpu["device"], cpu["backend"], cpu["why"]) == ("cpu", "torch", "FLCE_BACKEND asks for it")
    assert facts["variables"]["FLCE_BACKEND"] == "torch"


def test_info_of_an_impossible_choice() -> None:
    facts = json.loads(run("info", "--json", FLCE_BACKEND="fortran").stdout)
    assert facts["devices"][-1]["backend"] is None
    assert any(
        "FLCE_BACKEND must be 'torch' or 'triton', got 'fortran'" in problem for problem in facts["known_problems"]
    )


FINE: dict[str, Any] = {
    "packages": {"torch": "2.11.0+cu130", "triton": "3.6.0", "transformers": "5.17.0", "numpy": "2.5.2", "trl": None},
    "tested": {"torch": ["2.11.0", "2.14.1"], "triton": ["3.6.0", "3.8.0"], "transformers": ["4.56.2", "5.23.0"]},
    "lacking": [],
    "variables": {},
    "devices": [
        {"device": "cuda:0", "backend": "triton", "why": "", "logits_in_registers": True},
        {"device": "cpu", "backend": "torch", "why": "", "logits_in_registers": False},
    ],
}


@pytest.mark.parametrize(
    "change, said",
    [
        ({"packages": {"torch": "2.10.0"}}, "install torch 2.11 or newer"),
        ({"packages": {"triton": "3.5.1"}}, "install triton 3.6 or newer"),
        ({"packages": {"transformers": "4.55.4"}}, "install transformers 4.56 or newer"),
        ({"packages": {"trl": "1.16.0"}}, "do not use a patched head"),
        ({"lacking": ["torch 3.0.0 has no torch._C.x"]}, "has no torch._C.x"),
        ({"variables": {"TRITON_INTERPRET": "1"}}, "NumPy 2.4"),
        ({"devices": [{"device": "cuda:0", "backend": "torch", "logits_in_registers": False}]}, "PyTorch's operators"),
        ({"devices": [{"device": "cuda:0", "backend": "triton", "logits_in_registers": False}]}, "capability 9"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_known_problems(change: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info_command, "_c_compiler", lambda: True)
    assert info_command.known_problems(FINE) == []
    facts = copy.deepcopy(FINE)
    for name, value in change.items():
        facts[name] = value if isinstance(value, list) else facts[name] | value
    assert any(said in problem for problem in info_command.known_problems(facts))


def test_triton_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info_command, "_c_compiler", lambda: False)
    assert "install gcc" in info_command.known_problems(FINE)[0]
    newer = copy.deepcopy(FINE)
    newer["packages"]["triton"] = "3.7.1"
    assert info_command.known_problems(newer) == []
