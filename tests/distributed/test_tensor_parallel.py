"""Comparisons of patched models, whose head is divided over processes by classes, with stock in one process."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import re
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor, nn

pytest.importorskip("transformers")
if not dist.is_available():
    pytest.skip("PyTorch without torch.distributed", allow_module_level=True)

import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import flce
from benchmarks.memory import profile_memory
from flce.huggingface import MaterializedLogitsError, MaterializedLogitsWarning, NotFusedWarning
from tests.distributed.training import (
    LOSSES,
    STEPS,
    V,
    adamw,
    batch,
    check_fused,
    check_late_reads,
    check_same,
    device,
    from_transformers,
    gather_full,
    own_loss,
    shifted,
    tiny_llama,
    train,
    with_labels,
    with_lora,
)
from tests.processes import in_processes, skip_with_fewer_gpus

GATHERED = ColwiseParallel(output_layouts=Replicate())
DTENSOR = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)


def _mesh(*sizes: int) -> Any:
    names = ("replicate", "shard", "tp")[-len(sizes) :]
    return init_device_mesh(device().type, sizes, mesh_dim_names=names)


def _pytorch(plan: Callable[[], dict[str, Any]], patch_first: bool = True) -> Callable[[Any], Any]:
    def wrap(model: Any) -> Any:
        mesh = _mesh(dist.get_world_size())
        if not patch_first:
            return flce.patch_model(parallelize_module(model, mesh, plan()))
        return parallelize_module(flce.patch_model(model), mesh, plan())

    return wrap


def _transformers(**config: Any) -> Callable[[Any], Any]:
    return lambda model: flce.patch_model(from_transformers(model, tp_plan="auto", **config))


def _fsdp2(*sizes: int, reshard: bool) -> Callable[[Any], Any]:
    """Divide the head over the last dimension of a mesh, and shard the model over the others."""

    def wrap(model: Any) -> Any:
        from torch.distributed.fsdp import fully_shard

        mesh = _mesh(*sizes)
        parallelize_module(flce.patch_model(model), mesh["tp"], {"lm_head": GATHERED})
        data = mesh[mesh.mesh_dim_names[:-1]]
        for unit in (*model.model.layers, [model.model.norm, model.lm_head]):
            fully_shard(unit, mesh=data, reshard_after_forward=reshard)
        return fully_shard(model, mesh=data)

    return wrap


def _compiled_layers(model: Any) -> Any:
    for layer in model.model.layers:
        layer.compile(backend="eager", fullgraph=True)
    return _pytorch(lambda: {"lm_head": GATHERED})(model)


def _checkpointed(model: Any) -> Any:
    model.gradient_checkpointing_enable()
    return _transformers(tp_size=2)(model)


ADAPTED = "base_model.model.lm_head.base_layer"

STYLES: dict[str, Callable[[Any], Any]] = {
    "gathered": _pytorch(lambda: {"lm_head": GATHERED}),
    "patched after": _pytorch(lambda: {"lm_head": GATHERED}, patch_first=False),
    "DTensor": _pytorch(lambda: {"lm_head": DTENSOR}),
    "adapted head": _pytorch(lambda: {ADAPTED: GATHERED}),
    # The head waits for the gather of its input, which PyTorch starts without waiting.
    "gathered input": _pytorch(
        lambda: {
            "model.norm": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0)),
            "lm_head": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
        }
    ),
    "compiled layers": _compiled_layers,
    "transformers": _transformers(tp_size=2),
    "transformers, checkpointed": _checkpointed,
    "transformers, 2 x 2": _transformers(tp_size=2, fsdp_size=2),
    "2 x 2": _fsdp2(2, 2, reshard=False),
    "2 x 2, resharded": _fsdp2(2, 2, reshard=True),
    "2 x 1 x 2, resharded": _fsdp2(2, 1, 2, reshard=True),
}


def num_items(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(11, device=ids.device)).loss


def lse_and_gather(model: Any, ids: Tensor) -> Tensor:
    """Return a loss from the logits of the targets, which are computed in the processes that have their classes."""
    logits, target = shifted(model(input_ids=ids).logits, ids)
    values: Tensor = logits.logsumexp(-1) - logits.gather(-1, target[:, None]).squeeze(-1)
    return values.mean()


ALL_LOSSES = LOSSES | {"num_items": num_items, "lse and gather": lse_and_gather}


def divisible_sizes() -> dict[str, int]:
    """Return sizes for Transformers' tensor parallelism, whose first versions need V to be divisible."""
    is_old = Version(transformers.__version__) < Version("5.20")
    return {"num_key_value_heads": 2} | ({"vocab_size": 98} if is_old else {})


def skip_old_transformers(style: str, trained: str = "all") -> None:
    """Skip what Transformers itself cannot do: 5.17 does not load a model on a mesh of two dimensions, and does not
    tell PEFT how layers are divided."""
    if style.startswith("transformers"):
        skip_with_fewer_gpus(4 if " x " in style else 2)
        pytest.importorskip("transformers", minversion="5.20" if " x " in style or trained == "backbone" else "5.17")


def compare(style: str, loss: str, trained: str = "all", **config: Any) -> None:
    """Compare losses and gradients of a patched model under tensor parallelism with stock in one process."""
    skip_old_transformers(style, trained)
    warnings.simplefilter("ignore" if loss == "real logits" else "error", MaterializedLogitsWarning)
    torch._dynamo.reset()
    stock = tiny_llama(**(divisible_sizes() if style.startswith("transformers") else {}), **config)
    model = copy.deepcopy(stock)
    if trained == "head":  # PEFT supports no adapter on a head that is divided already
        stock, model = with_lora(trained)(stock), with_lora(trained)(model)
    model = STYLES[style](model)
    if trained == "backbone":  # PEFT draws the adapters of a divided layer for each process
        stock = flce.unpatch_model(STYLES[style](stock))
        stock, model = with_lora(trained)(stock), with_lora(trained)(model)
    data_ranks = dist.get_world_size() // 2 if " x " in style else 1
    own = dist.get_rank() // 2 if data_ranks > 1 else 0
    context = (lambda last: loss_parallel()) if style == "DTensor" else (lambda last: contextlib.nullcontext())
    got = train(model, ALL_LOSSES[loss], own=own, context=context)
    check_same(got, train(stock, ALL_LOSSES[loss], own=own, ranks=range(data_ranks)), 1e-5)
    check_fused(model, 0 if loss in ("materialized", "real logits") else STEPS)


@pytest.mark.parametrize(
    "style, loss, trained",
    [
        *(("gathered", loss, "all") for loss in ALL_LOSSES),
        *(("DTensor", loss, "all") for loss in ("labels", "own loss", "z-loss", "real logits")),
        *(("transformers", loss, "all") for loss in ("labels", "num_items", "lse and gather")),
        ("patched after", "own loss", "all"),
        ("gathered input", "own loss", "all"),
        ("compiled layers", "labels", "all"),
        ("transformers, checkpointed", "labels", "all"),
        ("transformers", "own loss", "backbone"),
        ("adapted head", "own loss", "head"),
    ],
)
@in_processes(2)
def test_trains_as_one_process(style, loss, trained):
    compare(style, loss, trained)


@in_processes(2)
def test_tied_embeddings():
    compare("transformers", "own loss", tie_word_embeddings=True)


@pytest.mark.parametrize(
    "style, loss",
    [
        ("2 x 2", "labels"),
        ("2 x 2, resharded", "own loss"),
        ("2 x 2, resharded", "real logits"),
        ("2 x 1 x 2, resharded", "labels"),
        ("transformers, 2 x 2", "own loss"),
    ],
)
@in_processes(4)
def test_meshes_of_several_dimensions(style, loss):
    compare(style, loss)


@in_processes(2)
def test_details_of_transformers() -> None:
    """Check evaluation, generation, late reads and `unpatch_model` of a model with Transformers' ``forward``."""
    skip_old_transformers("transformers")
    stock = tiny_llama(**divisible_sizes())
    model = from_transformers(stock, tp_size=2, tp_plan="auto")
    ids, original = batch(0, 0), model.lm_head.forward
    flce.patch_model(model, on_materialize="raise")
    assert flce.patch_model(model, on_materialize="raise").lm_head.forward is not original
    expected = stock(input_ids=ids, labels=ids)
    with torch.no_grad():
        outputs = model.eval()(input_ids=ids, labels=ids)
        torch.testing.assert_close(outputs.loss, expected.loss)
        assert torch.equal(outputs.logits.argmax(-1), expected.logits.argmax(-1))
        assert not flce.huggingface.lazy.is_lazy(model(input_ids=ids).logits)
        with flce.huggingface.lazy_logits(model):
            logits = model(input_ids=ids).logits[:, 1:]
            torch.testing.assert_close(logits.logsumexp(-1), expected.logits[:, 1:].logsumexp(-1))
            settings: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
            assert torch.equal(model.generate(ids[:1], **settings), stock.eval().generate(ids[:1], **settings))
    report = flce.report(model)
    assert (report.fused, report.values, sum(report.stock.values())) == (1, 2, 0), report
    flce.patch_model(model.train(), on_materialize="ignore")
    check_late_reads(model, expected.logits.detach(), Tensor.backward, adamw(model).step, rank=0)
    flce.patch_model(model, on_materialize="raise")
    with pytest.raises(MaterializedLogitsError, match=r"torch.Tensor.square"):
        model(input_ids=ids).logits.square()
    linear: Any = F.linear
    F.linear = lambda x, weight, bias=None: x @ weight.t()  # type: ignore[assignment]
    with pytest.raises(MaterializedLogitsError, match=r"zero.Init"):
        model(input_ids=ids)
    F.linear = linear
    patched = model.lm_head.forward
    # Accelerate's hooks wrap a `forward` in this way.
    wrapped = model.lm_head.forward = functools.update_wrapper(functools.partial(patched), patched)
    assert flce.unpatch_model(model).lm_head.forward is wrapped
    model.lm_head.forward = patched
    flce.unpatch_model(flce.patch_model(model))
    assert model.lm_head.forward is original
    assert type(model(input_ids=ids).logits) is Tensor


@in_processes(2)
def test_logits_that_are_a_dtensor() -> None:
    """Check that logits are a DTensor where stock's are, and their placements."""
    stock = tiny_llama(vocab_size=97)
    model = STYLES["DTensor"](copy.deepcopy(stock))
    flce.patch_model(model, on_materialize="ignore")
    ids = batch(0, 0)
    expected = stock(input_ids=ids).logits
    logits: Any = model(input_ids=ids).logits
    assert isinstance(logits, DTensor)
    assert isinstance(logits, Tensor)
    assert (logits.placements, tuple(logits.shape)) == ((Shard(2),), tuple(expected.shape))
    flat: Any = logits.flatten(0, 1)
    assert flat.placements == (Shard(1),)
    assert logits.redistribute(placements=[Shard(-1)]) is logits
    with loss_parallel():
        loss: Any = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        assert isinstance(loss, DTensor)
        loss.backward()
    torch.testing.assert_close(loss.full_tensor(), F.cross_entropy(expected.flatten(0, 1), ids.flatten()))
    labels = distribute_tensor(ids, logits.device_mesh, [Shard(0)])
    by_token = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(
        gather_full(by_token), F.cross_entropy(expected.flatten(0, 1), ids.flatten(), reduction="none")
    )
    best = logits.argmax(-1)
    assert isinstance(best, DTensor)
    assert torch.equal(best.full_tensor(), expected.argmax(-1))
    full: Any = logits.full_tensor()
    assert not isinstance(full, DTensor)
    torch.testing.assert_close(full.logsumexp(-1), expected.logsumexp(-1))
    assert not flce.report(model).materialized
    torch.testing.assert_close(full.materialize(), expected)
    local = model(input_ids=ids).logits.to_local()
    torch.testing.assert_close(local, expected.chunk(2, -1)[dist.get_rank()])
    by_token = model(input_ids=ids).logits.redistribute(placements=[Shard(0)])
    torch.testing.assert_close(by_token.to_local(), expected.chunk(2)[dist.get_rank()])
    rounded = model(input_ids=ids).logits.redistribute(placements=[Replicate()], forward_dtype=torch.bfloat16)
    assert rounded.dtype == torch.bfloat16
    assert len(flce.report(model).materialized) == 4
    # The gradient of each process is a part of the sum.
    gradients = []
    for each in (model, flce.unpatch_model(copy.deepcopy(model))):
        each.zero_grad()
        replicated = each(input_ids=ids).logits.redistribute(placements=[Replicate()])
        F.cross_entropy(*shifted(replicated.to_local(grad_placements=[Partial()]), ids)).backward()
        gradients.append(gather_full(each.lm_head.weight.grad))
    torch.testing.assert_close(*gradients)
    assert "LazyLogits" in repr(model(input_ids=ids).logits)


@in_processes(2)
def test_memory() -> None:
    """Check that no process allocates logits, of all classes or of its own."""
    model = tiny_llama(vocab_size=16001, num_hidden_layers=1)
    model = STYLES["gathered"](model)
    flce.patch_model(model, options=flce.ChunkOptions(max_workspace_bytes=1 << 20), on_materialize="raise")
    ids = torch.arange(400, device=device())[None] % 97
    with_labels(model, ids).backward()
    model.zero_grad()
    peak = profile_memory(lambda: with_labels(model, ids).backward(), device=device()).peak
    gradients = sum(p.numel() * 4 for p in model.parameters()) - 16001 * 32 * 2
    assert peak < gradients + (5 << 20) < 16001 * 400 * 2, peak  # half of the logits in float32


class Head(nn.Module):
    """Embedding and head with few classes, of which some processes have none."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embedding, self.lm_head = nn.Embedding(classes, 32), nn.Linear(32, classes)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor) -> Any:
        return SimpleNamespace(logits=self.lm_head(self.embedding(input_ids)))


@in_processes(4)
def test_few_classes() -> None:
    """Check a head with a bias, and processes without classes."""
    for loss, classes in itertools.product(("own loss", "lse and gather", "entropies", "real logits"), (3, 9)):
        torch.manual_seed(0)
        stock = Head(classes).to(device())
        model = parallelize_module(copy.deepcopy(stock), _mesh(dist.get_world_size()), {"lm_head": GATHERED})
        flce.patch_model(model, on_materialize="ignore")
        ids = batch(0, 0) % classes
        values = [ALL_LOSSES[loss](each, ids) for each in (model, stock)]
        torch.testing.assert_close(*values)
        for value in values:
            value.backward()
        for got, expected in zip(model.parameters(), stock.parameters(), strict=True):
            assert got.grad is not None
            torch.testing.assert_close(gather_full(got.grad), expected.grad, rtol=1e-4, atol=1e-6)
        assert flce.report(model).fused, loss


@in_processes(2)
def test_heads_that_run_stock_code() -> None:
    """Check the reasons for heads that run stock code: compiled, or not divided by classes."""
    by_hidden = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    for style, reason in ((by_hidden, r"is not Shard\(0\) on a mesh"), (GATHERED, "compiled head is divided")):
        torch.manual_seed(0)
        stock, ids = Head(V).to(device()), batch(0, 0)
        model = parallelize_module(copy.deepcopy(stock), _mesh(dist.get_world_size()), {"lm_head": style})
        if style is GATHERED:
            model.compile(backend="eager")
        flce.patch_model(model)
        with warnings.catch_warnings(record=True) as caught:  # in the second step
            warnings.simplefilter("always")
            for _ in range(2):
                own_loss(model, ids).backward()
        assert [found.category for found in caught if re.search(reason, str(found.message))] == [NotFusedWarning]
        torch.testing.assert_close(own_loss(model, ids), own_loss(stock, ids))
        with pytest.raises(MaterializedLogitsError, match=reason):
            own_loss(flce.patch_model(model, on_materialize="raise"), ids)
