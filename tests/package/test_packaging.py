"""Tests of the source distribution and the wheel: files, metadata, and a run of the wheel."""

from __future__ import annotations

import ast
import email.message
import email.parser
import json
import os
import re
import shutil
import subprocess
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import flce
from flce import __main__ as command
from flce.core import sizes
from tests.processes import ROOT, run_python

FOLDERS = ("flce", "tests", "benchmarks", "integrations", "scripts", "docs")  # folders of a checkout


class Built(NamedTuple):
    source: Path
    wheel: Path


def python(code: str, folder: Path, *arguments: str, **env: str) -> str:
    """Run ``code`` in a new process in ``folder``. Return the last line of its output."""
    return run_python("-c", code, *arguments, cwd=folder, env=env).stdout.strip().splitlines()[-1]


def build(kind: str, folder: Path, out: Path) -> Path:
    """Build a distribution like `python -m build`, with the installed setuptools, so without a download."""
    code = f"import sys; from setuptools.build_meta import build_{kind} as build; print(build(sys.argv[1]))"
    return out / python(code, folder, str(out), PYTHONPATH="")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build the source distribution from a copy of the checkout, and the wheel from the source distribution."""
    try:
        version = metadata.version("setuptools")
    except metadata.PackageNotFoundError:
        pytest.skip("setuptools is not installed")
    if int(version.partition(".")[0]) < 77:
        pytest.skip(f"setuptools {version} is older than pyproject.toml requires")
    folder = tmp_path_factory.mktemp("build")
    checkout = folder / "checkout"
    checkout.mkdir()
    for file in ROOT.iterdir():
        if file.is_file() and file.name != ".git":
            shutil.copy(file, checkout)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    source = build("sdist", checkout, folder)
    with tarfile.open(source) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return Built(source, build("wheel", unpacked, folder))


def package() -> set[str]:
    """Return the files of the package in this checkout."""
    return {str(file.relative_to(ROOT)) for file in (ROOT / "flce").rglob("*.py")} | {"flce/py.typed"}


def test_the_wheel_is_the_package(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        names = set(archive.namelist())
    metadata_files = {name for name in names if name.startswith(f"flce-{flce.__version__}.dist-info/")}
    assert names - metadata_files == package()
    assert f"flce-{flce.__version__}.dist-info/licenses/LICENSE" in metadata_files
    assert built.wheel.name == f"flce-{flce.__version__}-py3-none-any.whl"


def test_the_source_distribution_is_the_package(built: Built) -> None:
    with tarfile.open(built.source) as archive:
        files = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    generated = {name for name in files if name.startswith("flce.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    others = {"pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"}
    assert files - generated == package() | others


def test_metadata(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        text = archive.read(f"flce-{flce.__version__}.dist-info/METADATA").decode()
    about: email.message.Message[str, str] = email.parser.Parser().parsestr(text)
    assert (about["Name"], about["Version"]) == ("flce", flce.__version__)
    assert about["License-Expression"] == "MIT"
    assert about["Requires-Python"] == ">=3.10"
    assert about["Description-Content-Type"] == "text/markdown"
    assert str(about.get_payload()).strip() == (ROOT / "README.md").read_text().strip()
    extras = {"cli", "transformers", "trainers", "docs", "dev"}
    assert set(about.get_all("Provides-Extra", [])) == extras
    needed = [line for line in about.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert [re.split(r"[^\w-]", line)[0] for line in needed] == ["torch", "triton"]
    assert 'flce[cli,transformers]; extra == "trainers"' in about.get_all("Requires-Dist", [])
    assert "Typing :: Typed" in about.get_all("Classifier", [])


WITHOUT = """
import json, sys
for name in ("triton", "transformers", "tokenizers", "accelerate"):
    sys.modules[name] = None
import torch, flce
x = torch.randn(9, 8, requires_grad=True)
w = torch.randn(30, 8, requires_grad=True)
y = torch.randint(0, 30, (9,))
loss = flce.fused_linear_cross_entropy(x, w, y)
loss.backward()
a = x.detach().clone().requires_grad_()
stock = torch.nn.functional.cross_entropy(a @ w.detach().t(), y)
stock.backward()
ok = torch.allclose(x.grad, a.grad, atol=1e-6) and torch.allclose(loss, stock)
module = flce.LinearCrossEntropyLoss(8, 30)
module(x, y).backward()
plan = flce.plan(4096, 64, 1000, torch.bfloat16, device="cuda")
try:
    flce.patch_model(object())
    error_text = ""
except Exception as error:
    error_text = f"{type(error).__name__}: {error}"
facts = {"right": ok, "plan": str(plan), "error": error_text, "file": flce.__file__, "version": flce.__version__}
print(json.dumps(facts))
"""


def test_the_wheel_works_without_triton_and_transformers(built: Built, tmp_path: Path) -> None:
    """Check that only a call of `patch_model` needs Transformers, and that it raises for an object without a model."""
    with zipfile.ZipFile(built.wheel) as archive:
        archive.extractall(tmp_path)
    result: Any = json.loads(python(WITHOUT, tmp_path, PYTHONPATH=str(tmp_path)))
    assert Path(result["file"]) == tmp_path / "flce" / "__init__.py"
    assert result["right"]
    assert result["plan"]
    assert result["error"]
    assert result["version"] == flce.__version__


def test_the_address(tmp_path: Path) -> None:
    """Run the step of the release that sets the address of the repository."""
    shutil.copytree(ROOT / "flce" / "core", tmp_path / "flce" / "core")
    for name in ("CITATION.cff", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    release = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    (step,) = re.findall(r"- name: The address of the project\n +run: \|\n((?: {10}.*\n)+)", release)
    environment = {**os.environ, "GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "owner/flce"}
    subprocess.run(["bash", "-euc", step], cwd=tmp_path, env=environment, check=True)
    address = '"https://github.com/owner/flce"'
    assert f"\nrepository-code: {address}\n" in (tmp_path / "CITATION.cff").read_text()
    assert f"\n[project.urls]\nHomepage = {address}\n" in (tmp_path / "pyproject.toml").read_text()


def test_locate_page(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sizes.locate_page("memory.md") == "docs/memory.md in flce's repository"
    monkeypatch.setattr(sizes, "REPOSITORY_URL", "https://github.com/owner/flce")
    assert sizes.locate_page("memory.md") == "https://github.com/owner/flce/blob/main/docs/memory.md"


def test_messages_name_only_files_of_the_wheel() -> None:
    """Check that messages use `locate_page` for documents, and package names instead of extras."""
    wrong = []
    for file in (ROOT / "flce").rglob("*.py"):
        tree = ast.parse(file.read_text())
        texts = {id(node): node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        for node in ast.walk(tree):  # docstrings are not messages
            if isinstance(node, ast.Expr):
                texts.pop(id(node.value), None)
        wrong += [(file.name, text) for text in texts.values() if re.search(r"docs/\w|flce\[", str(text))]
    assert wrong == []
    (extra,) = re.findall(r"^cli = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert command.COMMAND_LINE_PACKAGES.split() == re.findall(r'"([\w-]+)', extra)


def test_versions_agree() -> None:
    """Compare the versions of the package, pyproject.toml and the citation. The changelog has an entry."""
    version = re.escape(flce.__version__)
    for file, line in (
        ("pyproject.toml", rf'^version = "{version}"$'),
        ("CITATION.cff", rf'^version: "{version}"$'),
        ("CHANGELOG.md", rf"^## {version} \("),
    ):
        assert re.search(line, (ROOT / file).read_text(), re.MULTILINE), file


@pytest.mark.parametrize("file", ["ci.yml", "release.yml"])
def test_workflows(file: str) -> None:
    """Check the YAML of workflows: minimal permissions, the commit and the version of each action, existing make
    targets."""
    yaml = pytest.importorskip("yaml")
    text = (ROOT / ".github" / "workflows" / file).read_text()
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    assert "group" in workflow["concurrency"]
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    used = re.findall(r"uses: (.*)", text)
    assert len(used) == len([step for step in steps if "uses" in step])
    assert all(re.search(r"@[0-9a-f]{40}  # v\d+\.\d+\.\d+$", action) for action in used), used
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = re.findall(r"\bmake ([a-z-]+)", "\n".join(step.get("run", "") for step in steps))
    assert called
    assert set(called) <= targets


def test_the_issue_template() -> None:
    """Check that the template requests the output of commands with existing options."""
    yaml = pytest.importorskip("yaml")
    typer = pytest.importorskip("typer", reason="the command line")
    from benchmarks.cli import app as benchmarks
    from flce.tools.cli import app

    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    fields = {field["id"]: field for field in form["body"]}
    assert len(fields) == len(form["body"])
    for name, started, commands in (("check", "flce check", app), ("bench", "python -m benchmarks quick", benchmarks)):
        assert fields[name]["validations"] == {"required": True}
        description = fields[name]["attributes"]["description"]
        assert f"`{started}" in description
        command = typer.main.get_command(commands).commands[started.split()[-1]]
        options = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", description)) <= options
