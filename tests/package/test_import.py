"""Tests of the import of the package: time, loaded modules, public names. Tests run new processes."""

from __future__ import annotations

import importlib
import importlib.util
import json
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest

import flce
from tests.processes import ROOT, run_python


def python(code: str, **env: str) -> Any:
    """Run ``code`` in a new process. Return the JSON of its last line."""
    return json.loads(run_python("-c", code, env=env).stdout.strip().splitlines()[-1])


MEASURE = """
import json, sys, time
start = time.process_time()
import torch
after_torch, before = time.process_time(), set(sys.modules)
import flce
after = time.process_time()
new = sorted({m.partition(".")[0] for m in set(sys.modules) - before})
print(json.dumps({"torch": after_torch - start, "flce": after - after_torch, "new": new}))
"""


def test_import_is_fast() -> None:
    """Check that the import takes less than 0.5 s more than PyTorch, and loads neither Triton nor Transformers."""
    runs = []
    for _ in range(5):
        runs.append(python(MEASURE))
        if runs[-1]["flce"] < 0.25:
            break
    assert min(run["flce"] for run in runs) < 0.5, runs
    for name in ("triton", "transformers", "numpy", "accelerate"):
        assert name not in runs[-1]["new"], runs[-1]["new"]


DOCUMENTED = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.M)
OPERATORS = {
    *("linear_cross_entropy", "linear_cross_entropy_backward", "cross_entropy", "cross_entropy_backward"),
    *("softmax", "softmax_backward", "scale_", "scale_cast", "linear_logprobs", "linear_logprobs_backward"),
    *("gather_sequence", "scatter_sequence"),
}
VARIABLES = {"FLCE_BACKEND", "FLCE_DEBUG", "FLCE_LOG", "FLCE_PROFILE"}


def test_public_names_are_the_documented_ones() -> None:
    from flce import huggingface
    from flce.huggingface import trl

    model_names = set(huggingface.__all__) - set(flce.__all__)  # names of both are documented once
    public = [f"flce.{name}" for name in flce.__all__] + [f"flce.huggingface.{name}" for name in model_names]
    public += [f"flce.huggingface.trl.{name}" for name in trl.__all__]
    documented = DOCUMENTED
    if importlib.util.find_spec("megatron"):
        public += [f"flce.megatron.{name}" for name in importlib.import_module("flce.megatron").__all__]
    else:
        documented = [name for name in DOCUMENTED if not name.startswith("flce.megatron.")]
    assert sorted(documented) == sorted(public)
    assert {"is_patched", "patch_model", "report", "unpatch_model"} <= set(huggingface.__all__)
    assert set(flce.__all__) <= set(dir(flce))
    assert isinstance(flce.__version__, str)
    assert (Path(flce.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_documented_name_exists(name: str) -> None:
    if name.endswith("FlceCallback"):
        pytest.importorskip("transformers")
    if name.startswith("flce.megatron."):
        pytest.importorskip("megatron")
    found = pkgutil.resolve_name(name)
    assert callable(found)
    assert found.__doc__
    assert getattr(pkgutil.resolve_name(found.__module__), found.__name__) is found


PROCESS_PROGRAM = """
import json, os
if EARLY:
    import torch.utils.flop_counter
import torch, flce
flce.fused_linear_cross_entropy, flce.cross_entropy, flce.softmax
operators = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("flce::")]
from torch.utils.flop_counter import FlopCounterMode
x, w = torch.randn(9, 8, requires_grad=True), torch.randn(30, 8)
errors, counts = [], []
for name in (None, "torch", "fortran"):
    if name:
        os.environ["FLCE_BACKEND"] = name
    try:
        with FlopCounterMode(display=False) as counter:
            flce.fused_linear_cross_entropy(x, w, torch.zeros(9).long()).backward()
        counts.append(counter.get_total_flops())
    except Exception as error:
        errors.append(str(error))
print(json.dumps([operators, counts, errors]))
"""


@pytest.mark.parametrize("early", [True, False])
def test_operators_flops_and_backend_of_a_process(early: bool) -> None:
    """Check registration and backends in a new process.

    The import of the functions registers the operators, so that graphs can name them. A flop counter works, imported
    before or after flce. A CPU runs the PyTorch backend; an unknown backend is an error.
    """
    operators, counts, (unknown,) = python(PROCESS_PROGRAM.replace("EARLY", str(early)))
    assert set(operators) == {f"flce::{name}" for name in OPERATORS}
    assert counts == [2 * 2 * 9 * 8 * 30] * 2
    assert "fortran" in unknown


def test_variables_of_the_environment_are_documented() -> None:
    """Check the documentation of the variables. Other tests check their effects."""

    def named(*files: Path) -> set[str]:
        return {name for file in files for name in re.findall(r"\bFLCE_[A-Z]+\b", file.read_text())}

    assert named(*(ROOT / "flce").rglob("*.py")) == VARIABLES
    code = "\n".join(file.read_text() for file in (ROOT / "flce").rglob("*.py"))
    assert set(re.findall(r'environ(?:\.get\(|\[)"(\w+)"', code)) <= VARIABLES | {"TRITON_INTERPRET", "CC"}
    assert "getenv" not in code
    assert named(ROOT / "docs" / "troubleshooting.md") >= VARIABLES


TOOLS = ("flce.tools", "flce.testing")


def test_the_package_does_not_import_its_tools() -> None:
    """Check imports: tools import no benchmarks and no tests. Only the command line imports Typer and Rich."""
    package = ROOT / "flce"
    for file in {*package.rglob("*.py")} - {package / "__main__.py"}:
        floor = ".".join(["flce", *file.relative_to(package).parts])
        others: tuple[str, ...] = ("benchmarks", "integrations", "tests") if floor.startswith(TOOLS) else TOOLS
        if not floor.startswith("flce.tools.cli"):
            others += ("typer", "rich", "flce.tools.cli")
        found = re.findall(r"^ *(?:from|import) ([\w.]+)", file.read_text(), re.M)
        assert not [name for name in found if name.startswith(others)], file
