"""Comparisons of patched models under wrappers (DDP, FSDP, ...) in two processes with stock in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import own_tokens, training
from tests.distributed.pair import World

CALLS = ["labels", "own loss"]
# Every path of a gradient out of lazy logits: with a gathered weight, with a freed weight, and through DDP's sink.
EVERY_LOSS = ["root", "tail, resharded", "DDP, static graph"]
FSDP2 = [name for name in training.WRAPPINGS if not name.startswith("DDP")]


@pytest.mark.parametrize(
    "wrapping, loss",
    [(w, loss) for w in training.WRAPPINGS for loss in training.LOSSES if w in EVERY_LOSS or loss == "own loss"],
)
def test_trains_as_one_process(pair: World, wrapping: str, loss: str) -> None:
    pair.run(training.compare, wrapping, loss)


@pytest.mark.parametrize("loss", CALLS)
@pytest.mark.parametrize("wrapping", ["root", "tail, resharded"])
def test_all_but_the_head_frozen(pair: World, wrapping: str, loss: str) -> None:
    """Check a unit whose inputs need no gradient: FSDP2 then depends on the hook of its outputs only."""
    pair.run(training.compare, wrapping, loss, "only the head")


@pytest.mark.parametrize("wrapping, loss", [("root", "own loss"), ("tail", "labels"), ("tail, resharded", "own loss")])
def test_mixed_precision(pair: World, wrapping: str, loss: str) -> None:
    pair.run(training.mixed_precision, wrapping, loss)


@pytest.mark.parametrize("loss", CALLS)
def test_cpu_offload(pair: World, loss: str) -> None:
    pair.run(training.compare, "offloaded", loss)


@pytest.mark.parametrize("loss", [*CALLS, "frozen meanwhile"])
@pytest.mark.parametrize("wrapping", ["tail", "tail, resharded"])
def test_tied_embeddings(pair: World, wrapping: str, loss: str) -> None:
    pair.run(training.compare, wrapping, loss, tie_word_embeddings=True)


@pytest.mark.parametrize(
    "adapters, wrapping, loss",
    [
        ("backbone", "root", "own loss"),
        ("head", "root", "labels"),
        ("head", "tail", "own loss"),
        ("modules_to_save", "root", "own loss"),
        ("head", "tail, resharded", "own loss"),
        ("modules_to_save", "tail, resharded", "labels"),
        ("modules_to_save", "tail, resharded", "frozen meanwhile"),
    ],
)
def test_adapters(pair: World, adapters: str, wrapping: str, loss: str) -> None:
    pytest.importorskip("peft")
    pair.run(training.compare, wrapping, loss, adapters)


@pytest.mark.parametrize("wrapping", ["root", "tail, resharded", "head", "head, resharded", "DDP"])
def test_a_head_of_trl(pair: World, wrapping: str) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("trl", minversion="1.16", reason="it is in the extra `trainers`")
    pair.run(training.trl_head, wrapping != "root", wrapping)


def test_accumulation_without_gradient_sync(pair: World) -> None:
    pair.run(training.accumulated, "own loss")


@pytest.mark.parametrize("loss", CALLS)
@pytest.mark.parametrize("wrapping", FSDP2)
def test_communication(pair: World, wrapping: str, loss: str) -> None:
    """Check that patched has as many reduce-scatters as stock, and at most one more all-gather."""
    for stock, patched in pair.run(training.collectives, loss, wrapping):
        assert patched["_reduce_scatter_base_"] == stock["_reduce_scatter_base_"]
        assert stock["_allgather_base_"] <= patched["_allgather_base_"] <= stock["_allgather_base_"] + 1


@pytest.mark.parametrize("precision, loss", [("no", "own loss"), ("bf16", "labels")])
def test_accelerate(pair: World, precision: str, loss: str) -> None:
    pytest.importorskip("accelerate", minversion="1.12")
    pair.run(training.accelerated, loss, precision)


@pytest.mark.parametrize("loss", CALLS)
@pytest.mark.parametrize("order", ["patched, set up", "set up, patched"])
def test_lightning_fabric(pair: World, order: str, loss: str) -> None:
    pytest.importorskip("lightning.fabric", reason="it is in the extra `trainers`")
    pair.run(training.fabric, loss, order)


@pytest.mark.parametrize("loss", CALLS)
def test_transformers(pair: World, loss: str) -> None:
    pytest.importorskip("transformers", minversion="5.20")
    pair.run(training.transformers_fsdp, loss)


@pytest.mark.parametrize("wrapping", ["root", "head, resharded", "DDP"])
def test_late_reads(pair: World, wrapping: str) -> None:
    pair.run(training.late_reads, wrapping)


def test_evaluation_in_a_wrapper(pair: World) -> None:
    pytest.importorskip("peft")
    pair.run(training.evaluated_in_a_wrapper)


@pytest.mark.parametrize(
    "compiled_part, wrapping", [("the model", "fully_shard(model)"), ("the wrapper", "DDP, unused parameters")]
)
def test_compiled(pair: World, compiled_part: str, wrapping: str) -> None:
    pair.run(training.compiled, compiled_part, wrapping)


@pytest.mark.parametrize("loss", ["smoothed", "z-loss"])
def test_one_gather_a_loss(pair: World, loss: str) -> None:
    """Check losses that consist of two losses."""
    for stock, patched in pair.run(training.collectives, loss, "tail, resharded"):
        assert patched["_allgather_base_"] <= stock["_allgather_base_"] + 2


@pytest.mark.parametrize("loss", CALLS)
def test_hybrid_sharding(four: World, loss: str) -> None:
    four.run(training.compare, "hybrid", loss)


@pytest.mark.parametrize(
    "loss, original, settings",
    [
        ("labels", True, ("no", False)),
        ("own loss", False, ("no", False)),
        ("own loss", True, ("bf16", False)),
        ("labels", False, ("no", True)),
        ("own loss", True, ("no", True, "SHARD_GRAD_OP")),
        ("entropies", True, ("no", True)),
        ("real logits", False, ("no", True)),
        ("labels", True, ("bf16", True)),
    ],
)
def test_fsdp1(pair: World, loss: str, original: bool, settings: Any) -> None:
    for counts, warned in pair.run(training.fsdp1, loss, original, *settings):
        assert counts["fused"] >= training.STEPS
        assert counts["stock"] == 0
        assert warned == ({"MaterializedLogitsWarning"} if loss == "real logits" else set())


@pytest.mark.parametrize("wrapping", ["DDP", "tail, resharded"])
def test_mean_over_the_tokens_of_all_processes(pair: World, wrapping: str) -> None:
    """Check unequal numbers of labels, and a process without labels."""
    pair.run(own_tokens.sequences, wrapping)


def test_mean_over_pieces_of_sequences(pair: World) -> None:
    pair.run(own_tokens.pieces, "DDP")


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.gpu
@two_gpus
def test_context_parallelism(pair: World) -> None:
    pair.run(own_tokens.context_parallel)


@pytest.mark.gpu
@two_gpus
def test_data_parallel_gathers_no_logits(pair: World) -> None:
    peak, _ = pair.run(training.data_parallel)
    assert peak < 4 * 512 * 16000 * 4 / 3  # of the logits of both GPUs in float32
