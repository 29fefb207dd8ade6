"""Run the Python blocks and the ``flce`` commands of README.md and docs/, and compare their output with the page.

CONTRIBUTING.md ("Snippets") has the convention. Nothing here depends on the text of a page.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import logging
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flce
from flce.testing import tiny_model

ROOT = Path(__file__).parents[2]
# Other tests run the blocks of these pages, and compare with other libraries.
OTHER_TESTS = {"migrate.md": "tests/docs/test_migrate.py", "trainers.md": "tests/integrations/test_trainers.py"}
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if page.name not in OTHER_TESTS]
PART = re.compile(
    r"^(?P<heading>#+ )|^( *)```(?P<language>\w+)(?P<info>[^\n]*)\n(?P<code>.*?)^ *```$"
    r"(\n\n?^ *```text\n(?P<output>.*?)^ *```$)?",
    re.MULTILINE | re.DOTALL,
)
REASON = re.compile(r'\{ *notest="[^"]+" *\}')


def examples(folder: Path) -> dict[str, Callable[[], Any]]:
    """Return functions that create the values of names that a page uses and does not define."""

    def transformers(name: str) -> Any:
        return getattr(pytest.importorskip("transformers"), name)

    def saved_model() -> Path:
        tiny_model().save_pretrained(folder / "model")
        return folder / "model"

    return {
        "hidden": lambda: torch.randn(2, 6, 16, requires_grad=True),
        "W": lambda: torch.randn(100, 16, requires_grad=True),
        "logits": lambda: torch.randn(2, 6, 100, requires_grad=True) * 1.0,
        "targets": lambda: torch.randint(100, (2, 6)),
        "input_ids": lambda: torch.randint(64, (2, 8)),
        "labels": lambda: torch.randint(64, (2, 8)),
        "model": lambda: transformers("PreTrainedModel") and flce.patch_model(tiny_model().train()),
        "path": saved_model,
        "Trainer": lambda: transformers("Trainer"),
        "SFTTrainer": lambda: transformers("Trainer"),
        "args": lambda: transformers("TrainingArguments")(folder / "out", report_to=[]),
        "data": lambda: [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}],
    }


@contextlib.contextmanager
def restored_state(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what a page changes outside of its names. A page about processes gets a group of this process."""
    monkeypatch.chdir(folder)
    # As on a user's machine without a GPU.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed prints a warning to stdout, if it is installed
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    level, has_processes = logging.getLogger("flce").level, "torch.distributed" in text
    if has_processes:
        dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
    try:
        yield
    finally:
        logging.getLogger("flce").setLevel(level)
        if has_processes:
            dist.destroy_process_group()
        if (trl := sys.modules.get("flce.huggingface.trl")) is not None:
            trl.uninstall()


def run_commands(code: str, folder: Path) -> None:
    """Run ``flce`` commands. ``./NAME`` is the config of a benchmark's model."""
    testing = pytest.importorskip("typer.testing", reason="the command line")
    from benchmarks.models import ARCHITECTURES
    from flce.tools.cli import app

    for line in code.splitlines():
        command, *words = shlex.split(line.removeprefix("$ "), comments=True)
        assert command == "flce", "only the output of flce can be compared"
        for name in {word.removeprefix("./") for word in words} & ARCHITECTURES.keys():
            config = pytest.importorskip("transformers").AutoConfig.for_model(**ARCHITECTURES[name])
            config.save_pretrained(folder / name)
        print(testing.CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, words).stdout, end="")


def run_page(text: str, where: str, folder: Path) -> None:
    """Run the blocks one after the other, with the names of the blocks before. `examples` are new in each section."""
    names: dict[str, Any] = {"__name__": "__main__"}
    missing, values = list[str](), examples(folder)
    for part in PART.finditer(text):
        if part["heading"]:
            names = {name: names[name] for name in names.keys() - values.keys()}
            continue
        code, shown = (re.sub(f"^{part[2]}", "", part[group] or "", flags=re.M) for group in ("code", "output"))
        is_python = part["language"] in ("python", "py")
        if REASON.search(part["info"]) or not (is_python or (part["language"] in ("sh", "console") and shown)):
            continue
        line, printed = text.count("\n", 0, part.start()) + 1, io.StringIO()
        torch.manual_seed(0)
        try:
            with contextlib.redirect_stdout(printed):
                if not is_python:
                    run_commands(code, folder)
                else:
                    used = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
                    names |= {name: values[name]() for name in used & values.keys() - names.keys()}
                    exec(compile("\n" * line + code, where, "exec"), names)
        except ModuleNotFoundError as error:
            missing.append(f"{error.name} (line {line})")
            continue
        except NameError as error:
            pytest.fail(f"{where}:{line}: {error}. Show its import, or define it in an earlier block.")
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        if not doctest.OutputChecker().check_output(shown, printed.getvalue(), flags):
            pytest.fail(f"{where}:{line} prints\n{printed.getvalue()}\nand the page shows\n{shown or 'no text block'}")
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page.read_text()
    with restored_state(text, tmp_path, monkeypatch):
        run_page(text, str(page.relative_to(ROOT)), tmp_path)


PAGE = '```python\nprint("one")\n```\n\n```text\none\n```\n\n```python { notest="needs a GPU" }\nunknown\n```\n'
COMMAND = "\n```console\n$ flce --version\n```\n\n```text\nflce ...\n```\n"


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("```text\none\n", "```text\ntwo\n", r"page.md:1 prints\none\n"),
        ("```text\none\n```", "", r"page.md:1 prints\none\n"),
        ('{ notest="needs a GPU" }', "", "page.md:9: name 'unknown' is not defined. Show its import"),
        ("flce ...", "other", r"page.md:13 prints\nflce 0"),
    ],
)
def test_wrong_pages(old: str, new: str, message: str, tmp_path: Path) -> None:
    run_page(PAGE + COMMAND, "page.md", tmp_path)
    with pytest.raises(pytest.fail.Exception, match=message):
        run_page((PAGE + COMMAND).replace(old, new), "page.md", tmp_path)
