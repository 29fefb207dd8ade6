"""Promises of SECURITY.md: no code from data, no network, no files, licences, strange tensors."""

from __future__ import annotations

import ast
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flce
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
                of_torch = isinstance(function, ast.Attribute) and name in (
                    "compile",
                    "eval",
                )  # torch.compile, model.eval
                assert name not in FORBIDDEN_CALLS or of_torch, (file, node.lineno, name)
                assert ast.unparse(function) != "torch.load", (file, node.lineno)
                for keyword in node.keywords:
                    assert keyword.arg != "trust_remote_code" or ast.unparse(keyword.value) == "False", file


PROGRAM = """
import sys, torch, torch._dynamo
import triton.language
def refuse(event, arguments):
    writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
    if writes or event.startswith(("socket.", "os.mkdir", "os.remove", "os.rename", "subprocess.", "urllib.")):
        raise PermissionError(f"{event} {arguments}")
sys.addaudithook(refuse)
import importlib, pkgutil, flce
for module in pkgutil.walk_packages(flce.__path__, "flce."):
    if not module.name.startswith(("flce.huggingface", "flce.tools", "flce.__main__", "flce.backends.triton")):
        importlib.import_module(module.name)
x, w = torch.randn(5, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
flce.fused_linear_cross_entropy(x, w, torch.randint(30, (5,))).backward()
print(float(x.grad.norm()) > 0)
"""


def test_no_network_and_no_files(tmp_path: Path) -> None:
    """Sockets, files that are written, and processes are refused, and the home cannot be written to."""
    home = tmp_path / "home"
    home.mkdir(mode=0o500)
    done = run_python("-c", PROGRAM, env={"HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1", "FLCE_BACKEND": "torch"})
    assert done.stdout.strip() == "True"
    assert not [*home.iterdir()]


ALLOWED = re.compile(r"MIT|BSD|Apache|PSF|Python Software|ISC|MPL|Unlicense|NVIDIA", re.IGNORECASE)


def test_licences_of_dependencies() -> None:
    """Every package that flce installs has a licence that permits its use in a product."""
    missing, seen = ["flce"], set[str]()
    while missing:
        name = missing.pop()
        try:
            about: Any = metadata.metadata(name)
        except metadata.PackageNotFoundError:
            continue  # for other platforms
        if name in seen:
            continue
        seen.add(name)
        texts = [about.get("License-Expression") or "", (about.get("License") or "")[:200]]
        texts += [each for each in about.get_all("Classifier", []) if each.startswith("License")]
        assert any(map(ALLOWED.search, texts)), f"{name}: {texts}"
        for line in metadata.requires(name) or []:
            if "extra ==" not in line:
                missing.append(re.split(r"[^\w.-]", line)[0])
    assert "torch" in seen


# A tensor with the values of `t`, or with overlapping memory, in the middle of memory that is NaN.
PLACES = {
    "padded": lambda t: _surrounded(t, (t.shape[1] + 3, 1)),
    "transposed": lambda t: _surrounded(t, (1, t.shape[0] + 2)),
    "every second": lambda t: _surrounded(t, (2 * t.shape[1] + 1, 2)),
    "one row": lambda t: _surrounded(t, (0, 1)),
    "one column": lambda t: _surrounded(t, (1, 0)),
    "windows": lambda t: _surrounded(t, (1, 1)),
}


def _surrounded(t: Tensor, strides: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return the tensor and its memory."""
    last = sum((size - 1) * stride for size, stride in zip(t.shape, strides, strict=True))
    memory = torch.full((last + 99,), torch.nan, dtype=t.dtype, device=t.device)
    view = memory.as_strided(t.shape, strides, 49)
    for row, values in enumerate(t):  # rows may overlap
        view[row].copy_(values) if strides[1] else view[row, :1].copy_(values[:1])
    return view, memory


@pytest.mark.parametrize("place", PLACES)
def test_strange_strides(place: str, backend: str, device: torch.device) -> None:
    """No element outside of a tensor is read or written: results equal the results of contiguous copies."""
    g = torch.Generator().manual_seed(3)
    x, w, z = (torch.randn(*shape, generator=g).to(device) for shape in ((9, 7), (21, 7), (9, 21)))
    y = torch.randint(21, (9, 2), generator=g).to(device)[:, 1]
    kept = [PLACES[place](t) for t in (x, w, z)]
    before = [memory.clone() for _, memory in kept]

    def results(x: Tensor, w: Tensor, z: Tensor) -> list[Tensor]:
        x, w, z = (t.detach().requires_grad_() for t in (x, w, z))
        found: list[Any] = []
        for strategy in ("tokens", "vocab"):
            options = flce.ChunkOptions(strategy=strategy)
            loss = flce.fused_linear_cross_entropy(x, w, y, options=options, reduction="none")
            found += [loss, *torch.autograd.grad(loss.sum(), (x, w))]
        logprob = flce.linear_logprobs(x, w, y).logprob
        loss = flce.cross_entropy(z, y)
        assert isinstance(loss, Tensor)
        found += [logprob, loss, *torch.autograd.grad(loss, z), flce.softmax(z), flce.log_softmax(z, 0)]
        return found

    contiguous = [view.contiguous().clone() for view, _ in kept]
    for got, expected in zip(results(*(view for view, _ in kept)), results(*contiguous), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    for (_, memory), old in zip(kept, before, strict=True):
        torch.testing.assert_close(memory, old, rtol=0, atol=0, equal_nan=True)
