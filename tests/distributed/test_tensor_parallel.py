"""Comparisons of patched models, whose head is divided over processes by classes, with stock in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.pair import World, skip_with_fewer_gpus

if not dist.is_available():
    pytest.skip("PyTorch without torch.distributed", allow_module_level=True)
tensor_parallel = pytest.importorskip("tests.distributed.tensor_parallel")

CASES: list[tuple[Any, ...]] = [
    *(("gathered", loss) for loss in tensor_parallel.ALL_LOSSES),
    *(("DTensor", loss) for loss in ("labels", "own loss", "z-loss", "real logits")),
    *(("transformers", loss) for loss in ("labels", "num_items", "lse and gather")),
    ("patched after", "own loss"),
    ("gathered input", "own loss"),
    ("compiled layers", "labels"),
    ("transformers, checkpointed", "labels"),
    ("transformers", "own loss", "backbone"),
    ("adapted head", "own loss", "head"),
]
CASES_OF_FOUR = [
    ("2 x 2", "labels"),
    ("2 x 2, resharded", "own loss"),
    ("2 x 2, resharded", "real logits"),
    ("2 x 1 x 2, resharded", "labels"),
    ("transformers, 2 x 2", "own loss"),
]


def skip_old_transformers(style: str, *trained: str) -> None:
    """Skip what Transformers itself cannot do: 5.17 does not load a model on a mesh of two dimensions, and does not
    tell PEFT how layers are divided."""
    if style.startswith("transformers"):
        skip_with_fewer_gpus(4 if " x " in style else 2)
        pytest.importorskip("transformers", minversion="5.20" if " x " in style or "backbone" in trained else "5.17")


@pytest.mark.parametrize("arguments", CASES, ids=", ".join)
def test_trains_as_one_process(pair: World, arguments: tuple[Any, ...]) -> None:
    skip_old_transformers(arguments[0], *arguments[2:])
    if len(arguments) > 2:
        pytest.importorskip("peft")
    pair.run(tensor_parallel.compare, *arguments)


def test_tied_embeddings(pair: World) -> None:
    skip_old_transformers("transformers")
    pair.run(tensor_parallel.compare, "transformers", "own loss", tie_word_embeddings=True)


@pytest.mark.parametrize("arguments", CASES_OF_FOUR, ids=", ".join)
def test_meshes_of_several_dimensions(four: World, arguments: tuple[str, ...]) -> None:
    skip_old_transformers(arguments[0])
    four.run(tensor_parallel.compare, *arguments)


def test_few_classes(four: World) -> None:
    four.run(tensor_parallel.few_classes)


def test_details_of_transformers(pair: World) -> None:
    skip_old_transformers("transformers")
    pair.run(tensor_parallel.transformers_details)


@pytest.mark.parametrize(
    "function", [tensor_parallel.dtensor_logits, tensor_parallel.stock_heads, tensor_parallel.memory]
)
def test_of_pytorch(pair: World, function: Any) -> None:
    pair.run(function)
