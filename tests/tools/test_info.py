"""Tests of the command ``flce`` without a subcommand, and of ``flce info``."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the command line")
pytest.importorskip("rich", reason="the command line")

from typer.testing import CliRunner

import flce
from flce.__main__ import COMMAND_LINE_PACKAGES, main
from flce.tools.cli import app, known_problems
from tests.processes import run_python

COMMANDS = sorted(command.callback.__name__ for command in app.registered_commands if command.callback)


def info(*arguments: str) -> Any:
    output = CliRunner(env={"COLUMNS": "120"}).invoke(app, ["info", *arguments])
    assert output.exit_code == 0, output.output
    return json.loads(output.stdout) if "--json" in arguments else output.stdout


def test_help_is_fast_and_has_an_example() -> None:
    """Check that `--help` imports no slow package: the import of PyTorch alone takes more than a second."""
    code = """
import sys
sys.argv[0] = "flce"
try:
    __import__("flce.__main__").__main__.main()
finally:
    print(sorted({"torch", "transformers", "triton", "numpy", "matplotlib"} & set(sys.modules)), file=sys.stderr)
"""
    for arguments in (["--help"], *([command, "--help"] for command in COMMANDS)):
        start = time.perf_counter()
        done = run_python("-c", code, *arguments, env={"COLUMNS": "120"})
        assert done.stderr.strip().splitlines()[-1] == "[]", arguments
        assert time.perf_counter() - start < 10  # about 1 s on an idle machine
        assert len(arguments) == 1 or f"flce {arguments[0]}" in done.stdout


@pytest.mark.parametrize("missing", ["typer", "rich", "flce.tools.cli.plan"])
def test_without_a_module(missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that the error names the missing package to install. The error of another module is not hidden."""
    for name in [name for name in sys.modules if name.startswith((f"{missing}.", "flce.tools.cli"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    if missing == "flce.tools.cli.plan":
        with pytest.raises(ModuleNotFoundError, match=missing):
            main()
        return
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err == f"The command line of flce needs {missing}: pip install {COMMAND_LINE_PACKAGES}\n"


def test_version_and_no_command() -> None:
    assert run_python("-m", "flce", "--version").stdout == f"flce {flce.__version__}\n"
    assert CliRunner().invoke(app, []).exit_code == 2  # prints the help


def test_info(monkeypatch: pytest.MonkeyPatch) -> None:
    output = info()
    assert flce.__version__ in output
    assert torch.__version__ in output
    monkeypatch.setenv("FLCE_BACKEND", "torch")
    facts = info("--json")
    assert facts["packages"]["torch"] == torch.__version__
    cpu = facts["devices"][-1]
    assert (cpu["device"], cpu["backend"], cpu["why"]) == ("cpu", "torch", "FLCE_BACKEND selects it")
    assert facts["variables"]["FLCE_BACKEND"] == "torch"
    monkeypatch.setenv("FLCE_BACKEND", "fortran")
    facts = info("--json")
    assert facts["devices"][-1]["backend"] is None
    assert "'torch' or 'triton', got 'fortran'" in facts["devices"][-1]["why"]
    assert "backend None (" in info()


FINE: dict[str, Any] = {
    "packages": {"torch": "2.11.0+cu130", "triton": "3.6.0", "transformers": "5.17.0", "numpy": "2.5.2", "trl": None},
    "tested": {"torch": ["2.11.0", "2.14.1"], "triton": ["3.6.0", "3.8.0"], "transformers": ["4.56.2", "5.23.0"]},
    "lacking": [],
}


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"packages": {"torch": "2.10.0"}}, "install torch 2.11 or newer"),
        ({"packages": {"triton": "3.5.1"}}, "install triton 3.6 or newer"),
        ({"packages": {"transformers": "4.55.4"}}, "install transformers 4.56 or newer"),
        ({"packages": {"trl": "1.16.0"}}, "do not use a patched head"),
        ({"lacking": ["torch 3.0.0 has no torch._C.x"]}, "has no torch._C.x"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_known_problems(change: dict[str, Any], sentence: str) -> None:
    assert known_problems(FINE) == []
    facts = {**FINE, **change, "packages": FINE["packages"] | change.get("packages", {})}
    assert any(sentence in problem for problem in known_problems(facts))
