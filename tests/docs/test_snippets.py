"""Run every Python block and every ``flce`` command of README.md and docs/, and compare their output with the page.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flce
from flce.testing.models import tiny_model

ROOT = Path(__file__).parents[2]
# The tests of these two pages run their blocks, and compare with other libraries: test_migrate.py, test_trainers.py.
OTHER_TESTS = ("migrate.md", "trainers.md")
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in OTHER_TESTS)]
BLOCK = re.compile(
    r"^( *)```(?P<language>\w+)(?P<info>[^\n]*)\n(?P<code>.*?)^ *```$(\n\n?^ *```text\n(?P<output>.*?)^ *```$)?",
    re.MULTILINE | re.DOTALL,
)
REASON = re.compile(r'\{ *notest="([^"]+)" *\}')


@dataclass(frozen=True)
class Block:
    """A block of a page. ``output`` is the text that the page shows as its output, "" if there is none. ``section`` is
    the number of headings before it."""

    line: int
    section: int
    language: str
    info: str
    code: str
    output: str


def blocks(text: str, *languages: str) -> list[Block]:
    """Return the blocks in some languages that have no ``notest``."""
    found = []
    for match in BLOCK.finditer(text):
        code, output = (re.sub(f"^{match[1]}", "", part or "", flags=re.M) for part in match.group("code", "output"))
        before = re.sub(r"^ *```.*?^ *```$", "", text[: match.start()], flags=re.M | re.S)
        place = text.count("\n", 0, match.start()) + 1, len(re.findall("^#+ ", before, re.M))
        block = Block(*place, match["language"], match["info"], code, output)
        if block.language in languages and not REASON.search(block.info):
            found.append(block)
    return found


def compare(printed: str, block: Block, where: str) -> None:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    if not doctest.OutputChecker().check_output(block.output, printed, flags):
        pytest.fail(f"{where}:{block.line} prints\n{printed}\nand the page shows\n{block.output or 'no ```text block'}")


# --------------------------------------------------------------------------------------------- values of examples


def examples(folder: Path) -> dict[str, Callable[[], Any]]:
    """Return functions that create the values of names that a page uses and does not define."""

    def transformers(name: str, *args: Any, **kwargs: Any) -> Any:
        found = getattr(pytest.importorskip("transformers"), name)
        return found(*args, **kwargs) if args or kwargs else found

    def saved_model() -> Path:
        tiny_model().save_pretrained(folder / "model")
        return folder / "model"

    def patched_model() -> Any:
        pytest.importorskip("transformers")
        return flce.patch_model(tiny_model().train())

    return {
        "hidden": lambda: torch.randn(2, 6, 16, requires_grad=True),
        "W": lambda: torch.randn(100, 16, requires_grad=True),
        "logits": lambda: torch.randn(2, 6, 100, requires_grad=True) * 1.0,
        "targets": lambda: torch.randint(100, (2, 6)),
        "input_ids": lambda: torch.randint(64, (2, 8)),
        "labels": lambda: torch.randint(64, (2, 8)),
        "model": patched_model,
        "path": saved_model,
        "Trainer": lambda: transformers("Trainer"),
        "SFTTrainer": lambda: transformers("Trainer"),
        "args": lambda: transformers("TrainingArguments", folder / "out", report_to=[]),
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


# ----------------------------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the blocks of a page one after the other, with the names of the blocks before. Values of `examples` are new
    in each section."""
    run_page(page.read_text(), str(page.relative_to(ROOT)), tmp_path, monkeypatch)


def run_page(text: str, where: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    missing, values, section = list[str](), examples(folder), 0
    with restored_state(text, folder, monkeypatch):
        for block in blocks(text, "python", "py"):
            if block.section != section:
                section, names = block.section, {name: names[name] for name in names.keys() - values.keys()}
            tree = ast.parse(block.code, f"{where}:{block.line}")
            used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            for name in used & values.keys():
                if name not in names:
                    names[name] = values[name]()
            printed = io.StringIO()
            torch.manual_seed(0)
            try:
                with contextlib.redirect_stdout(printed):
                    exec(compile("\n" * block.line + block.code, where, "exec"), names)
            except ModuleNotFoundError as error:
                missing.append(f"{error.name} (line {block.line})")
                continue
            except NameError as error:
                pytest.fail(f"{where}:{block.line}: {error}. Show its import, or define it in an earlier block.")
            compare(printed.getvalue(), block, where)
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_with_output(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the ``flce`` commands of blocks with an output. ``./NAME`` is the config of a benchmark's model."""
    shown = [block for block in blocks(page.read_text(), "sh", "console") if block.output]
    if not shown:
        return
    typer_testing = pytest.importorskip("typer.testing", reason="the command line")
    from benchmarks.models import ARCHITECTURES
    from flce.tools.cli.app import app

    monkeypatch.chdir(tmp_path)
    for block in shown:
        printed = ""
        for line in block.code.splitlines():
            command, *words = shlex.split(line.removeprefix("$ "), comments=True)
            assert command == "flce", f"{page.name}:{block.line}: only outputs of flce can be compared"
            for name in {word.removeprefix("./") for word in words} & ARCHITECTURES.keys():
                config = pytest.importorskip("transformers").AutoConfig.for_model(**ARCHITECTURES[name])
                config.save_pretrained(tmp_path / name)
            printed += typer_testing.CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, words).stdout
        compare(printed, block, page.name)


PAGE = """
```python
import flce
print("one")
```

```text
one
```

```python { notest="needs a GPU" }
undefined
```

  ```python
  print(flce.plan)
  print(hidden.shape)
  ```
  ```text
  <function ...
  torch.Size([2, 6, 16])
  ```
"""


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("", "", None),
        ("one\n```\n\n```python {", "two\n```\n\n```python {", r"page.md:2 prints\none\n"),
        ("import flce", "", "page.md:15: name 'flce' is not defined. Show its import"),
        ('{ notest="needs a GPU" }', "", "page.md:11: name 'undefined' is not defined"),
        ("```text\none\n```", "", "page.md:2 prints\none"),
    ],
)
def test_the_runner(old: str, new: str, message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raises = pytest.raises(pytest.fail.Exception, match=message) if message else contextlib.nullcontext()
    with raises:
        run_page(PAGE.replace(old, new, 1), "page.md", tmp_path, monkeypatch)
