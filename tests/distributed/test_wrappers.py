"""Comparisons of patched models under wrappers (DDP, FSDP, ...) in two processes with stock in one process."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")
if not dist.is_available():
    pytest.skip("PyTorch without torch.distributed", allow_module_level=True)

import flce
from flce.huggingface import MaterializedLogitsWarning
from tests.distributed.training import (
    LOSSES,
    SPECIAL,
    STEPS,
    WRAPPINGS,
    LastStage,
    V,
    add_trl_head,
    batch,
    check_fused,
    check_late_reads,
    check_same,
    device,
    from_transformers,
    fsdp2,
    gather_full,
    own_loss,
    reference,
    rounding,
    stock_and_patched,
    tail,
    tiny_llama,
    train,
    trl_loss,
    with_labels,
    with_lora,
)
from tests.processes import in_processes

CALLS = ["labels", "own loss"]
# Every path of a gradient out of lazy logits: with a gathered weight, with a freed weight, and through DDP's sink.
EVERY_LOSS = ["root", "tail, resharded", "DDP, static graph"]
FSDP2 = [name for name in WRAPPINGS if not name.startswith("DDP")]


def compare(wrapping: str, loss: str, trained: str = "all", **config: Any) -> None:
    """Compare losses and gradients of a wrapped, patched model with stock in one process.

    Args:
        wrapping: a name of `WRAPPINGS` or `SPECIAL`.
        loss: a name of `LOSSES`.
        trained: "all", "only the head", or an argument of `with_lora`.
        config: changes of the model's configuration.
    """
    warnings.simplefilter("ignore" if loss == "real logits" else "error", MaterializedLogitsWarning)
    stock = tiny_llama(**config)
    if trained == "only the head":
        stock.requires_grad_(False).lm_head.requires_grad_(True)
    elif trained != "all":
        stock = with_lora(trained)(stock)
    patched = flce.patch_model(copy.deepcopy(stock))
    check_same(train((WRAPPINGS | SPECIAL)[wrapping](patched), LOSSES[loss]), reference(stock, LOSSES[loss]))
    check_fused(patched, 0 if loss == "materialized" else STEPS)


@pytest.mark.parametrize(
    "wrapping, loss", [(w, loss) for w in WRAPPINGS for loss in LOSSES if w in EVERY_LOSS or loss == "own loss"]
)
@in_processes(2)
def test_trains_as_one_process(wrapping, loss):
    compare(wrapping, loss)


@pytest.mark.parametrize("loss", CALLS)
@pytest.mark.parametrize("wrapping", ["root", "tail, resharded"])
@in_processes(2)
def test_all_but_the_head_frozen(wrapping, loss):
    """Check a unit whose inputs need no gradient: FSDP2 then depends on the hook of its outputs only."""
    compare(wrapping, loss, "only the head")


@pytest.mark.parametrize("loss", CALLS)
@in_processes(2)
def test_cpu_offload(loss):
    compare("offloaded", loss)


@pytest.mark.parametrize("loss", [*CALLS, "frozen meanwhile"])
@pytest.mark.parametrize("wrapping", ["tail", "tail, resharded"])
@in_processes(2)
def test_tied_embeddings(wrapping, loss):
    compare(wrapping, loss, tie_word_embeddings=True)


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
@in_processes(2)
def test_adapters(adapters, wrapping, loss):
    compare(wrapping, loss, adapters)


@pytest.mark.parametrize("loss", CALLS)
@in_processes(4)
def test_hybrid_sharding(loss):
    compare("hybrid", loss)


@pytest.mark.parametrize("wrapping, loss", [("root", "own loss"), ("tail", "labels"), ("tail, resharded", "own loss")])
@in_processes(2)
def test_mixed_precision(wrapping, loss):
    """Check that errors against float64 are not larger than the errors of stock in the same wrapper."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    arguments = () if wrapping == "root" else (wrapping != "tail",)
    stock, patched = stock_and_patched()
    exact = copy.deepcopy(stock).double()
    rank, batches = dist.get_rank(), 12  # the error of one loss may be small by chance
    true_losses = [LOSSES[loss](exact, batch(rank, i)).item() for i in range(batches)]
    true_gradients = reference(exact, LOSSES[loss])["gradients"]
    errors = []
    for each in (stock, patched):
        model = (tail if arguments else fsdp2)(each, *arguments, mp_policy=policy)
        losses = []
        for i in range(batches):
            value = LOSSES[loss](model, batch(rank, i))
            value.backward()
            losses.append(abs(value.item() - true_losses[i]))
        model.zero_grad()
        gradients = train(model, LOSSES[loss])["gradients"]
        norms = [(gradient.double() - true_gradients[name]).norm() for name, gradient in gradients.items()]
        errors.append((sum(losses), float(torch.stack(norms).norm())))
    for ours, theirs in zip(errors[1], errors[0], strict=True):
        assert ours <= 1.05 * theirs, errors
    assert flce.report(patched).fused == batches + STEPS


@pytest.mark.parametrize("wrapping", ["root", "tail, resharded", "head", "head, resharded", "DDP"])
@in_processes(2)
def test_a_head_of_trl(wrapping):
    """Compare TRL's loss with flce's head, trained together with adapters, with stock."""
    stock, patched = (with_lora("modules_to_save")(tiny_llama()) for _ in range(2))
    add_trl_head(patched.get_base_model())
    if wrapping.startswith("head"):  # like PEFT's policy for Accelerate
        saved = patched.get_base_model().lm_head.modules_to_save["default"]
        model = fsdp2(patched, [saved], reshard="resharded" in wrapping or None)
    else:
        model = WRAPPINGS[wrapping](patched)
    check_same(train(model, functools.partial(trl_loss, summed=wrapping != "root")), reference(stock, with_labels))
    check_fused(patched)


@in_processes(2)
def test_accumulation_without_gradient_sync():
    """Train with four micro-batches in each step, three of them without communication."""
    results = []
    for each in (models := stock_and_patched()):
        model = tail(each, True)

        def set_sync(last, model=model):
            model.set_requires_gradient_sync(last)
            return contextlib.nullcontext()

        results.append(train(model, own_loss, micro=4, context=set_sync))
    check_same(results[1], results[0])
    check_fused(models[1], 4 * STEPS)


class CountCollectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "wrapping, loss",
    [*((w, loss) for w in FSDP2 for loss in CALLS), ("tail, resharded", "smoothed"), ("tail, resharded", "z-loss")],
)
@in_processes(2)
def test_communication(wrapping, loss):
    """Check that patched has as many reduce-scatters as stock, and at most one more all-gather for each loss."""
    warnings.simplefilter("error", MaterializedLogitsWarning)
    counts = []
    for each in stock_and_patched():
        model = WRAPPINGS[wrapping](each)
        LOSSES[loss](model, batch(0, 0)).backward()
        with CountCollectives() as mode:
            LOSSES[loss](model, batch(0, 1)).backward()
        counts.append(mode.counts)
    stock, patched = counts
    assert patched["_reduce_scatter_base_"] == stock["_reduce_scatter_base_"]
    losses = 1 if loss in CALLS else 2
    assert stock["_allgather_base_"] <= patched["_allgather_base_"] <= stock["_allgather_base_"] + losses


@pytest.mark.parametrize("loss", CALLS)
@in_processes(2)
def test_transformers(loss):
    pytest.importorskip("transformers", minversion="5.20")
    stock = tiny_llama()
    model = flce.patch_model(from_transformers(stock, fsdp_size=2))
    check_same(train(model, LOSSES[loss]), reference(stock, LOSSES[loss]))
    check_fused(model)


@pytest.mark.parametrize("wrapping", ["root", "head, resharded", "DDP"])
@in_processes(2)
def test_late_reads(wrapping):
    stock = tiny_llama()
    patched = flce.patch_model(copy.deepcopy(stock), on_materialize="ignore")
    ids = batch(dist.get_rank(), 0)
    model = WRAPPINGS[wrapping](patched)
    if wrapping == "head, resharded":  # the gathered weight is freed
        assert model(input_ids=ids).logits._state.weight.untyped_storage().size() == 0
        # Without the model's forward, no hook gathers the head.
        with torch.no_grad(), flce.huggingface.lazy_logits(patched):
            late = patched.lm_head(torch.ones(2, 32, device=device()))
        assert late.argmax(-1).shape == (2,)
    step = torch.optim.AdamW(model.parameters(), lr=1e-1, fused=True).step
    check_late_reads(model, stock(input_ids=ids).logits.detach(), Tensor.backward, step)


@in_processes(2)
def test_evaluation_in_a_wrapper():
    """Compare logits of an evaluation if the FSDP unit of the head contains the patched model."""
    peft = pytest.importorskip("peft")
    stock = tiny_llama()
    patched = flce.patch_model(copy.deepcopy(stock), on_materialize="ignore")
    adapted = peft.get_peft_model(patched, peft.LoraConfig(target_modules=["q_proj"]))
    model = fsdp2(adapted, reshard_after_forward=True).eval()
    ids = batch(dist.get_rank(), 0)
    with torch.no_grad():
        logits = model(input_ids=ids, labels=ids).logits
        torch.testing.assert_close(logits.softmax(-1), stock(input_ids=ids).logits.softmax(-1))


@pytest.mark.parametrize(
    "compiled_part, wrapping", [("the model", "fully_shard(model)"), ("the wrapper", "DDP, unused parameters")]
)
@in_processes(2)
def test_compiled(compiled_part, wrapping):
    """Check that the wrappers' hooks run on the outputs of a compiled model."""
    torch._dynamo.reset()
    stock = tiny_llama(num_hidden_layers=1)
    patched = flce.patch_model(copy.deepcopy(stock))
    if compiled_part == "the model":
        patched.compile(backend="eager")
    wrapped = WRAPPINGS[wrapping](patched)
    if compiled_part == "the wrapper":
        wrapped.compile(backend="eager")
    check_same(train(wrapped, own_loss), reference(stock, own_loss))
    assert flce.report(patched).fused or flce.report(patched).materialized


@pytest.mark.parametrize(
    "loss, original, precision, separate_head, strategy",
    [
        ("labels", True, "no", False, "FULL_SHARD"),
        ("own loss", False, "no", False, "FULL_SHARD"),
        ("own loss", True, "bf16", False, "FULL_SHARD"),
        ("entropies", True, "no", False, "SHARD_GRAD_OP"),
        ("real logits", False, "no", False, "FULL_SHARD"),
        ("labels", False, "no", True, "FULL_SHARD"),
    ],
)
@in_processes(2)
def test_fsdp1(loss, original, precision, separate_head, strategy):
    """Compare patched and stock in the same wrapper. Check an evaluation. A head that is a unit runs stock code."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if precision == "bf16" else None

    def policy(module: nn.Module, recurse: bool, **_: Any) -> bool:
        is_head = separate_head and isinstance(module, nn.Linear) and module.out_features == V
        return recurse or isinstance(module, LlamaDecoderLayer) or is_head

    results: list[Any] = []
    settings: dict[str, Any] = {"auto_wrap_policy": policy, "use_orig_params": original, "mixed_precision": mixed}
    settings |= {"sharding_strategy": ShardingStrategy[strategy], "device_id": device()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for model in (models := stock_and_patched()):
            wrapped: Any = FullyShardedDataParallel(model, **settings)
            results.append(train(wrapped, LOSSES[loss]))
    ours = {w.category.__name__ for w in caught if w.category.__module__.startswith("flce")}
    if separate_head:
        assert ours == {"NotFusedWarning"}
        assert "the head is a separate FSDP1 unit" in f"{flce.report(models[1])}"
    else:
        assert ours == ({"MaterializedLogitsWarning"} if loss == "real logits" else set())
        check_fused(models[1])
    tolerance = rounding(1e-5 if precision == "no" else 5e-2)
    torch.testing.assert_close(results[1], results[0], rtol=tolerance, atol=tolerance)
    assert results[0]["losses"][-1] != results[0]["losses"][0]
    ids = batch(dist.get_rank(), 0)
    with torch.no_grad():
        assert wrapped(input_ids=ids, labels=ids).logits.argmax(-1).shape == ids.shape


# ------------------------------------------------------------------------------------- means over all processes


def check_gradients(model: Any, stock: Any) -> None:
    gradients = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    for name, parameter in stock.named_parameters():
        torch.testing.assert_close(gather_full(gradients[name]), parameter.grad, rtol=1e-4, atol=1e-6)


def labels_of(rank: int) -> Tensor:
    """Return labels of which processes have different numbers, the last process none."""
    labels = batch(rank, 0)
    labels[:, 2 + 3 * rank :] = -100
    return labels.fill_(-100) if rank == dist.get_world_size() - 1 else labels


@pytest.mark.parametrize("wrapping", ["DDP", "tail, resharded"])
@in_processes(2)
def test_mean_over_the_tokens_of_all_processes(wrapping):
    """Check unequal numbers of labels, and a process without labels."""
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    stock = tiny_llama()
    model = WRAPPINGS[wrapping](flce.patch_model(copy.deepcopy(stock), on_materialize="raise"))
    ids, labels = torch.cat([batch(r, 0) for r in ranks]), torch.cat([labels_of(r) for r in ranks])
    expected = stock(input_ids=ids, labels=labels).loss
    expected.backward()
    mine = {"input_ids": batch(rank, 0), "labels": labels_of(rank)}
    num_items = flce.global_num_items(mine["labels"], shift=1)
    assert num_items.item() == (labels[:, 1:] != -100).sum().item()
    for is_trained in (True, False):
        with torch.set_grad_enabled(is_trained):
            loss = model.train(is_trained)(**mine, num_items_in_batch=num_items / len(ranks)).loss
            mean = loss.detach() / len(ranks)
            dist.all_reduce(mean)
            torch.testing.assert_close(mean, expected.detach())
            if is_trained:
                loss.backward()
                check_gradients(model, stock)
    check_fused(model, 2)


@in_processes(2)
def test_mean_over_pieces_of_sequences():
    """Check a model whose processes have pieces of the same sequences, as with context parallelism: the labels are
    shifted before. Also the operator, and two micro-batches."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    stock = LastStage().to(device())
    model = WRAPPINGS["DDP"](flce.patch_model(copy.deepcopy(stock), on_materialize="raise"))
    hidden = torch.randn(2, 8 * size, 32, device=device())
    labels = torch.randint(97, (2, 8 * size), device=device())
    labels[:, 3:11] = labels[:, -8:] = -100
    shift_labels = F.pad(labels[:, 1:], (0, 1), value=-100)
    F.cross_entropy(stock(hidden).flatten(0, 1), shift_labels.flatten()).backward()
    x, y = (t.chunk(size, 1)[rank] for t in (hidden, shift_labels))
    num_items = flce.global_num_items([y[:1], y[1:]]) / size
    weight = stock.lm_head.weight.detach().clone().requires_grad_()
    features = stock.layer(x).tanh().detach()
    for k in range(2):
        logits = model(x[k : k + 1])
        (F.cross_entropy(logits.flatten(0, 1), y[k], reduction="sum") / num_items).backward()
        loss: Any = flce.fused_linear_cross_entropy(features[k], weight, y[k], reduction="sum", num_items=num_items)
        loss.backward()
    check_gradients(model, stock)
    check_fused(model, 2)
    assert weight.grad is not None
    dist.all_reduce(weight.grad)
    torch.testing.assert_close(weight.grad / size, stock.lm_head.weight.grad, rtol=1e-4, atol=1e-6)


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.gpu
@two_gpus
@in_processes(2)
def test_data_parallel_gathers_no_logits():
    """Train with `nn.DataParallel` in the first process."""
    if dist.get_rank() > 0:
        return
    stock = tiny_llama(vocab_size=16000, max_position_embeddings=512)
    patched = flce.patch_model(copy.deepcopy(stock), options=flce.ChunkOptions(max_workspace_bytes=16 << 20))
    ids = torch.randint(16000, (4, 512), device="cuda:0")
    losses = []
    for model in (stock, patched):
        parallel = nn.DataParallel(model, device_ids=[0, 1])
        torch.cuda.reset_peak_memory_stats(0)
        before = torch.cuda.memory_allocated(0)
        outputs = parallel(input_ids=ids, labels=ids)
        outputs.loss.mean().backward()
        peak = torch.cuda.max_memory_allocated(0) - before
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MaterializedLogitsWarning)  # DataParallel gathers the logits
            logits = parallel(input_ids=ids).logits
        own = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        own.backward()
        losses.append((outputs.loss.mean().detach(), own.detach(), model.lm_head.weight.grad))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
    assert "logits" not in outputs
    assert peak < 4 * 512 * 16000 * 4 / 3  # of the logits of both GPUs in float32
