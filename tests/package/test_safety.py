"""Promises of SECURITY.md: no code from data, no network, no files, licences."""

from __future__ import annotations

import ast
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.processes import ROOT, run_python

FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "socket", "ssl", "urllib", "http", "requests", "ctypes", "dill"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "system", "popen"}


def test_code_is_never_data() -> None:
    """No module of flce unpickles, evaluates text, runs the code of a model's repository, or opens a connection."""
    for file in (ROOT / "flce").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                assert not FORBIDDEN_MODULES & {name.partition(".")[0] for name in names}, (file, names)
            elif isinstance(node, ast.Call):
                function = node.func
                name = getattr(function, "id", None) or getattr(function, "attr", "")
                is_method = isinstance(function, ast.Attribute) and name in ("compile", "eval")  # model.eval
                assert name not in FORBIDDEN_CALLS or is_method, (file, node.lineno, name)
                assert ast.unparse(function) != "torch.load", (file, node.lineno)
                for keyword in node.keywords:
                    assert keyword.arg != "trust_remote_code" or ast.unparse(keyword.value) == "False", file


PROGRAM = """
import os, sys, torch, torch._dynamo
import triton.language
def refuse(event, arguments):
    writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    if writes or event.startswith(("socket.", "os.mkdir", "os.remove", "os.rename", "subprocess.", "urllib.")):
        raise PermissionError(f"{event} {arguments}")
sys.addaudithook(refuse)
import importlib, pkgutil, flce
for module in pkgutil.walk_packages(flce.__path__, "flce."):
    if not module.name.startswith(("flce.huggingface", "flce.megatron", "flce.__main__")):  # two import other libraries
        importlib.import_module(module.name)
x, w = torch.randn(5, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
flce.fused_linear_cross_entropy(x, w, torch.randint(30, (5,))).backward()
print(float(x.grad.norm()) > 0)
"""


def test_no_network_and_no_files(tmp_path: Path) -> None:
    """Sockets, files that are written, and processes are refused, and the home cannot be written to."""
    home = tmp_path / "home"
    home.mkdir(mode=0o500)
    env = {"HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1", "FLCE_BACKEND": "torch"}
    done = run_python("-c", PROGRAM, env={**env, "CUDA_CACHE_PATH": str(tmp_path / "driver")})
    assert done.stdout.strip() == "True"
    assert not [*home.iterdir()]


ALLOWED = re.compile(r"\b(MIT|BSD|Apache|PSF|Python Software|ISC|MPL|Unlicense|NVIDIA)\b", re.IGNORECASE)


def test_licences_of_dependencies() -> None:
    """Every package that flce installs has a licence that permits its use in a product."""
    missing, seen = ["torch", "triton"], set[str]()  # of pyproject.toml; flce itself may not be installed
    while missing:
        name = missing.pop()
        try:
            about: Any = metadata.metadata(name)
        except metadata.PackageNotFoundError:
            continue  # for other platforms
        if name in seen:
            continue
        seen.add(name)
        # NVIDIA's meta package has an author only.
        texts = [about.get(field) or "" for field in ("License-Expression", "Author-email")]
        texts.append((about.get("License") or "")[:200])
        texts += [each for each in about.get_all("Classifier", []) if each.startswith("License")]
        assert any(map(ALLOWED.search, texts)), f"{name}: {texts}"
        for line in metadata.requires(name) or []:
            if "extra ==" not in line:
                missing.append(re.split(r"[^\w.-]", line)[0])
    assert "torch" in seen
