"""Tests of README and docs: links have targets, Python blocks run, commands and options exist."""

from __future__ import annotations

import doctest
import logging
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist

import flce

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
QUICK_START = "## Quick start\n"
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def ids(document: Path) -> str:
    return document.name


def anchors(document: Path) -> set[str]:
    """Return the anchors of the headings, named like common renderers name them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def blocks(language: str) -> list[Any]:
    """Return the texts of all blocks in a language."""
    found = []
    for document in DOCUMENTS:
        if document.name in ("migrate.md", "trainers.md"):  # run by `test_migrate.py` and `test_trainers.py`
            continue
        for number, match in enumerate(BLOCK.finditer(document.read_text())):
            indent, block_language, text = match.groups()
            # A block with sys.argv is a program, which tests/docs/test_quick_start.py runs.
            if block_language == language and "sys.argv" not in text:
                lines = [line.removeprefix(indent) for line in text.splitlines()]
                found.append(pytest.param("\n".join(lines), id=f"{document.name}-{number}"))
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_links(document: Path) -> None:
    for target in LINK.findall(document.read_text()):
        if re.match(r"[a-z]+:", target):  # a URL
            continue
        path, _, anchor = target.partition("#")
        found = (document.parent / path).resolve() if path else document
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_pictures_need_no_network(document: Path) -> None:
    """Check that pictures are files. A block of Mermaid needs a script from the network."""
    text = document.read_text()
    assert "```mermaid" not in text
    for target in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", text):
        picture = document.parent / target
        assert picture.is_file(), target
        if picture.suffix == ".svg":
            root = ElementTree.parse(picture).getroot()
            assert root.find("{http://www.w3.org/2000/svg}title") is not None
            assert not [element for element in root.iter() if any("href" in name for name in element.attrib)]


@pytest.mark.parametrize("text", blocks("python"))
def test_python(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Run a block with small values for the names that it does not define."""
    logits = torch.randn(2, 6, 100, requires_grad=True) * 1.0
    names: dict[str, Any] = {
        "flce": flce,
        "logging": logging,
        "torch": torch,
        "hidden": torch.randn(2, 6, 16, requires_grad=True),
        "W": torch.randn(100, 16, requires_grad=True),
        "logits": logits,
        "targets": torch.randint(100, (2, 6)),
        "input_ids": torch.randint(64, (2, 8)),
        "labels": torch.randint(64, (2, 8)),
    }
    monkeypatch.setattr(logging, "basicConfig", lambda: None)
    level = logging.getLogger("flce").level
    request.addfinalizer(lambda: logging.getLogger("flce").setLevel(level))
    if ">>>" in text:
        runner = doctest.DocTestRunner()
        runner.run(doctest.DocTestParser().get_doctest(text + "\n", names, "block", None, 0))
        assert runner.failures == 0
        return
    if "process_group" in text:
        create_process_group(tmp_path, request)
    if "trl.install()" in text:
        request.addfinalizer(lambda: flce.huggingface.trl.uninstall())
    if re.search(r"transformers|huggingface|Trainer|\bmodel\b", text):
        names |= trainer_names(tmp_path)
    if ".materialize()" in text or "lazy_logits(" in text:
        flce.patch_model(names["model"])
    exec(compile(text, "block", "exec"), names)
    if "loss" in names:
        names["loss"].backward()


def create_process_group(folder: Path, request: pytest.FixtureRequest) -> None:
    """Create a default group of this process only, until the test ends."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
    request.addfinalizer(dist.destroy_process_group)


def trainer_names(folder: Path) -> dict[str, Any]:
    """Return a saved model and the arguments of a `Trainer`, by name."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder / "model")
    return {
        "path": folder / "model",
        "model": model,
        "Trainer": transformers.Trainer,
        "SFTTrainer": transformers.Trainer,
        "args": transformers.TrainingArguments(folder / "out", report_to=[]),
        "data": [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}],
    }


@pytest.mark.parametrize("text", blocks("sh"))
def test_commands(text: str) -> None:
    """Check targets of the Makefile, parts of the GPU script, extras, commands and options of flce and benchmarks."""
    makefile, script = (ROOT / "Makefile").read_text(), (ROOT / "scripts" / "gpu_session.sh").read_text()
    for line in text.splitlines():
        words = line.partition(" #")[0].split()
        if not words or words[0].startswith("#"):
            continue
        while "=" in words[0]:  # a variable of the environment
            del words[0]
        if words[0] == "make":
            assert re.search(rf"^{re.escape(words[1])}:", makefile, re.M), line
        elif words[0] == "scripts/gpu_session.sh":
            for part in words[1:]:
                assert re.search(rf"^ +([\w-]+ \| )*{re.escape(part)}( \| [\w-]+)*\)", script, re.M), line
        elif words[:2] == ["pip", "install"]:
            (extra,) = re.findall(r"^'?(?:\.|dist/\S+|flce)\[([a-z]+)\]'?$", words[2])
            assert re.search(rf"^{extra} = ", (ROOT / "pyproject.toml").read_text(), re.M), line
        elif words[:2] == ["python", "finetune.py"]:
            assert QUICK_START in (ROOT / "README.md").read_text(), "tests/docs/test_quick_start.py runs this line"
        elif words[0] == "flce":
            from flce.tools.cli.app import app as flce_app

            check_command(flce_app, words[1:])
        else:
            from benchmarks.cli import app

            assert words[:3] == ["python", "-m", "benchmarks"], line
            check_command(app, words[3:])


def check_command(app: Any, words: list[str]) -> None:
    typer = pytest.importorskip("typer")
    command = typer.main.get_command(app).commands[words[0]]
    options = {name for parameter in command.params for name in parameter.opts}
    for word in words[1:]:
        assert not word.startswith("-") or word in options, word


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 110
    assert [line for line in lines if len(line) > 120 and line[0] != "|"] == []
