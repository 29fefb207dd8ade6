"""`scripts/plant_faults.py` and its list: every fault can still be planted, and one that no test finds is told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts import plant_faults
from scripts.plant_faults import Fault

MODULE = "def double(x):\n    return 2 * x\n"
TEST = "from module import double\n\n\ndef test_zero():\n    assert double(0) == 0\n\n\n"
TESTS = TEST + "def test_one():\n    assert double(1) == 2\n"


def test_every_fault_can_be_planted():
    assert plant_faults.obstacles(plant_faults.read(plant_faults.LIST), plant_faults.ROOT) == []


def test_a_list_that_has_rotted_is_told(tmp_path: Path):
    (tmp_path / "module.py").write_text(MODULE)
    faults = [
        Fault("gone", "module.py", "3 * x", "x", ("tests/test_module.py",)),
        Fault("twice", "module.py", "x", "y", ("-k one",)),
    ]
    gone, no_tests, twice = plant_faults.obstacles(faults, tmp_path)
    assert "gone: module.py has the text 0 times" in gone
    assert "gone: there are no tests tests/test_module.py" in no_tests
    assert "twice: module.py has the text 2 times" in twice


def test_what_finds_a_fault_and_what_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    (tmp_path / "tests").mkdir()
    (tmp_path / "module.py").write_text(MODULE)
    (tmp_path / "tests" / "test_module.py").write_text(TESTS)
    entry = '[[fault]]\nname = "{0}"\nfile = "module.py"\nfind = "2 * x"\nreplace = "{1}"\ntests = [{2}]\n'
    narrow, whole = '"tests/test_module.py -k zero"', '"tests/test_module.py"'
    entries = ("found", "3 * x", f"{narrow}, {whole}"), ("survives", "3 * x", narrow), ("none", "x", '"tests -k two"')
    faults = tmp_path / "faults.toml"
    faults.write_text("\n".join(entry.format(*values) for values in entries))
    monkeypatch.setattr(sys, "argv", ["plant_faults.py", "--tree", str(tmp_path), "--list", str(faults)])
    assert plant_faults.main() == 1
    out, err = capfd.readouterr()
    assert "tests/test_module.py::test_one" in out.splitlines()[0]
    assert [line.split()[-1] for line in out.splitlines()[1:3]] == ["SURVIVED", "SURVIVED"]
    assert out.splitlines()[-1] == "1 of 3 faults are found."
    assert "none: pytest could not run" in err
    assert (tmp_path / "module.py").read_text() == MODULE

    monkeypatch.setattr(sys, "argv", [*sys.argv, "^found"])
    assert plant_faults.main() == 0
