"""Tests of the public API with type checkers."""

from __future__ import annotations

import inspect
import json
import shutil
import sys
from pathlib import Path
from typing import get_args

import pytest

import flce
from tests.processes import ROOT, run_python


def test_strict_pyright_finds_nothing(tmp_path: Path) -> None:
    """Check a file that uses the public API, in a separate project. An unnecessary `type: ignore` is an error.

    `Tensor.backward` of PyTorch 2.13 has no types, which strict mode would report for every call. `make lint` runs mypy
    on the same file.
    """
    pytest.importorskip("pyright")
    settings = {
        "typeCheckingMode": "strict",
        "extraPaths": [str(ROOT)],
        "reportUnknownMemberType": "none",
        "reportUnnecessaryTypeIgnoreComment": "error",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    shutil.copy(ROOT / "tests" / "typing_public_api.py", tmp_path)
    done = run_python("-m", "pyright", "--pythonpath", sys.executable, "--project", str(tmp_path), cwd=tmp_path)
    assert "0 errors" in done.stdout


@pytest.mark.parametrize("name", ["fused_linear_cross_entropy", "cross_entropy"])
def test_overloads_have_all_arguments(name: str) -> None:
    """Check the arguments of overloads, which mypy does not, and that overloads are not imported at run time."""
    pytest.importorskip("typing_extensions")
    from flce.core import signatures

    linear, logits = signatures.LinearLossArguments, signatures.LogitsLossArguments
    arguments = linear.__optional_keys__ if name == "fused_linear_cross_entropy" else logits.__optional_keys__
    parameters = inspect.signature(getattr(flce, name)).parameters.values()
    fixed = {"stats"} | {p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    keywords = {p.name for p in parameters if p.name not in fixed}
    assert keywords == arguments
    assert get_args(signatures.SomeStats)[0] is str
    linear_fixed, logits_fixed = signatures.FixedLinearArguments, signatures.FixedLogitsArguments
    for module, arguments in (
        (flce.FusedLinearCrossEntropyLoss, linear_fixed.__optional_keys__),
        (flce.CrossEntropyLoss, logits_fixed.__optional_keys__),
    ):
        parameters = inspect.signature(module).parameters.values()
        assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == arguments
    run_python("-c", "import sys, flce; sys.exit('flce.core.signatures' in sys.modules)")
