"""`make recipes`: which scripts it runs, and what it makes of their exit statuses."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the scripts' command line")

import typer

import compare
import recipes

INTEGRATIONS = Path(__file__).parents[2] / "integrations"
REFUSES = 'import sys; print("script.py cannot run here: there is no GPU.", file=sys.stderr); sys.exit(2)'


def test_takes_the_scripts_that_compare():
    names = {path.name for path in recipes.scripts(INTEGRATIONS)}
    assert {"trainer.py", "trl_sft.py", "qlora.py", "accelerate_fsdp2.py", "liger_layers.py"} <= names
    assert not names & {"compare.py", "processes.py", "causal_lm.py", "recipes.py"}
    assert names >= recipes.OPTIONS.keys()


@pytest.mark.parametrize(
    "text, verdict, status",
    [
        ("print('fine')", "ok", 0),
        (REFUSES, "cannot run here: there is no GPU.", 0),
        ("raise SystemExit(1)", "FAILED", 1),
        ("raise SystemExit(2)", "FAILED", 1),  # wrong usage
        (REFUSES.replace("exit(2)", "exit(1)"), "FAILED", 1),
    ],
    ids=["ok", "refuses", "fails", "wrong usage", "says one thing and does another"],
)
def test_verdicts(tmp_path, capfd, text, verdict, status):
    fine, script = tmp_path / "fine.py", tmp_path / "script.py"
    fine.write_text("")
    script.write_text(text)
    assert recipes.run_all([[str(script), "--option"], [str(fine)]]) == status
    first, second = capfd.readouterr().out.splitlines()[-2:]
    assert first.startswith("script.py --option ")
    assert first.endswith(verdict)
    assert second.endswith("ok")


def test_a_missing_package_is_why_a_script_cannot_run(capsys):
    compare.need("pytest")
    with pytest.raises(typer.Exit) as refusal:
        compare.need("pytest", "no-such-package")
    assert refusal.value.exit_code == 2
    assert "cannot run here: no-such-package is not installed" in capsys.readouterr().err
