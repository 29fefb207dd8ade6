"""Functions that the processes of the distributed tests run: a small model, wrapped and trained, stock or patched."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import flce
from flce.huggingface import MaterializedLogitsWarning
from tests.huggingface.conftest import SIZES

V, STEPS = SIZES["vocab_size"], 3


def device() -> torch.device:
    """Return the GPU of this process with NCCL, else the CPU."""
    return torch.device("cuda", dist.get_rank()) if "nccl" in dist.get_backend() else torch.device("cpu")


def tiny_llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {**SIZES, "tie_word_embeddings": False, "initializer_range": 0.2, **changes}
    torch.manual_seed(0)
    config: Any = LlamaConfig(**settings)
    config._attn_implementation = "eager"
    return LlamaForCausalLM(config).train().to(device())


def stock_and_patched() -> tuple[Any, Any]:
    stock = tiny_llama()
    return stock, flce.patch_model(copy.deepcopy(stock))


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(3, V, (2, 9), generator=generator).to(device())


# ------------------------------------------------------------------------------------------------------------ losses


def shifted(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()


def with_labels(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def own_loss(model: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(*shifted(model(input_ids=ids).logits, ids))


def smoothed(model: Any, ids: Tensor) -> Tensor:
    """Return the loss of Trainer's label smoother."""
    logits, target = shifted(model(input_ids=ids).logits, ids)
    log_probs = -F.log_softmax(logits, dim=-1)
    nll, others = log_probs.gather(-1, target[:, None]), log_probs.sum(-1, keepdim=True)
    for each in (nll, others):
        each.masked_fill_(target[:, None] == 5, 0.0)
    return 0.9 * nll.mean() + 0.1 * others.mean() / V


def z_loss(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits
    return F.cross_entropy(*shifted(logits, ids)) + 0.1 * logits.logsumexp(-1).square().mean()


def entropies(model: Any, ids: Tensor) -> Tensor:
    """Return a loss with formulas that need the normalizer twice."""
    logits = model(input_ids=ids).logits
    entropy = logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)
    policy = torch.distributions.Categorical(logits=logits[:, 1:])
    return F.cross_entropy(*shifted(logits, ids)) - 0.1 * entropy.mean() - 0.1 * policy.entropy().mean()


def real_logits(model: Any, ids: Tensor) -> Tensor:
    """Return a loss with an operation without a lazy form, on a view."""
    logits, target = shifted(model(input_ids=ids).logits, ids)
    return F.cross_entropy(logits, target) + logits.softmax(-1).square().sum()


def materialized(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits
    logits = logits.materialize() if hasattr(logits, "materialize") else logits
    return F.cross_entropy(*shifted(logits, ids))


def two_losses(model: Any, ids: Tensor) -> Tensor:
    outputs = model(input_ids=ids, labels=ids)
    return outputs.loss + 0.5 * F.cross_entropy(outputs.logits[:, 1:].flatten(0, 1), ids[:, :-1].flatten())


def frozen_meanwhile(model: Any, ids: Tensor) -> Tensor:
    """Return a loss that is computed while parameters are frozen. They still receive a gradient."""
    logits = model(input_ids=ids).logits
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    loss = F.cross_entropy(*shifted(logits, ids))
    for parameter in trained:
        parameter.requires_grad_(True)
    return loss


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "labels": with_labels,
    "own loss": own_loss,
    "smoothed": smoothed,
    "z-loss": z_loss,
    "entropies": entropies,
    "real logits": real_logits,
    "materialized": materialized,
    "two losses": two_losses,
    "frozen meanwhile": frozen_meanwhile,
}


# ---------------------------------------------------------------------------------------------------------- wrapping


def _mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device().type, (dist.get_world_size(),))


def _fsdp2(model: Any, *units: list[nn.Module], reshard: bool | None = None, **kwargs: Any) -> Any:
    """Wrap decoder layers, ``units`` and the rest of the model."""
    from torch.distributed.fsdp import fully_shard

    kwargs.setdefault("mesh", _mesh())
    core = model.get_base_model() if hasattr(model, "get_base_model") else model
    for layer in core.model.layers:
        fully_shard(layer, **kwargs)
    for unit in units:
        fully_shard(unit if len(unit) > 1 else unit[0], reshard_after_forward=reshard, **kwargs)
    return fully_shard(model, **kwargs)


def _tail(model: Any, reshard: bool, **kwargs: Any) -> Any:
    core = model.get_base_model() if hasattr(model, "get_base_model") else model
    tied = core.model.embed_tokens.weight is core.lm_head.weight
    embedding = [core.model.embed_tokens] if tied else []
    return _fsdp2(model, [core.model.norm, *embedding, core.lm_head], reshard=reshard, **kwargs)


def _ddp(model: Any, **kwargs: Any) -> Any:
    return nn.parallel.DistributedDataParallel(model, **kwargs)


def _without_units(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=_mesh())


def _root_resharded(model: Any) -> Any:
    model = _fsdp2(model)
    model.set_reshard_after_forward(True, recurse=False)
    return model


def _offloaded(model: Any) -> Any:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return _tail(model, True, offload_policy=CPUOffloadPolicy(pin_memory=False))


def _hybrid(model: Any) -> Any:
    """Wrap with HSDP: two replicas of two shards."""
    from torch.distributed.device_mesh import init_device_mesh

    return _tail(model, True, mesh=init_device_mesh(device().type, (2, 2), mesh_dim_names=("replicate", "shard")))


WRAPPINGS: dict[str, Callable[[Any], Any]] = {
    "root": _fsdp2,
    "root, resharded": _root_resharded,
    "fully_shard(model)": _without_units,
    "tail": lambda model: _tail(model, False),
    "tail, resharded": lambda model: _tail(model, True),
    "head": lambda model: _fsdp2(model, [model.lm_head], reshard=False),
    "head, resharded": lambda model: _fsdp2(model, [model.lm_head], reshard=True),
    "DDP": _ddp,
    "DDP, static graph": lambda model: _ddp(model, static_graph=True),
    "DDP, unused parameters": lambda model: _ddp(model, find_unused_parameters=True),
}
SPECIAL: dict[str, Callable[[Any], Any]] = {"offloaded": _offloaded, "hybrid": _hybrid}


# ---------------------------------------------------------------------------------------------------------- training


def gather_full(tensor: Tensor) -> Tensor:
    gathered: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered.detach().clone().to(device())


def adamw(model: Any) -> torch.optim.Optimizer:
    groups: dict[Any, list[Tensor]] = {}
    for p in model.parameters():
        if p.requires_grad:
            groups.setdefault(getattr(p, "device_mesh", None), []).append(p)  # a fused step needs DTensors of one mesh
    return torch.optim.AdamW([{"params": group} for group in groups.values()], lr=1e-2, fused=True)


def train(
    model: Any,
    loss: Callable[[Any, Tensor], Tensor],
    optimizer: Any = None,
    backward: Callable[[Tensor], Any] = Tensor.backward,
    micro: int = 1,
    context: Callable[[bool], Any] = lambda last: contextlib.nullcontext(),
) -> dict[str, Any]:
    """Return the losses of this rank over some optimizer steps, and the gradients of the first step.

    Args:
        model: the model to train.
        loss: the loss of the model and a batch.
        optimizer: the optimizer. None: AdamW.
        backward: the function that runs the backward pass of a loss.
        micro: the number of micro-batches of a step.
        context: returns the context of a micro-batch. Its argument is True for the last micro-batch of a step.
    """
    optimizer = optimizer or adamw(model)
    losses, gradients = [], {}
    for step in range(STEPS):
        for k in range(micro):
            with context(k == micro - 1):
                value = loss(model, batch(dist.get_rank(), micro * step + k)) / micro
                backward(value)
            losses.append(value.item())
        if step == 0:
            named = [(n.removeprefix("module."), p.grad) for n, p in model.named_parameters()]
            gradients = {name: gather_full(grad) for name, grad in named if grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "gradients": gradients}


def reference(model: Any, loss: Callable[[Any, Tensor], Tensor]) -> dict[str, Any]:
    """Return the results of `train` in one process that has the batches of all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    optimizer = adamw(model)
    losses, gradients = [], {}
    for step in range(STEPS):
        for other in range(size):
            value = loss(model, batch(other, step))
            (value / size).backward()
            if other == rank:
                losses.append(value.item())
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "gradients": gradients}


def rounding(tolerance: float) -> float:
    """Return the tolerance after some steps. It is larger on a GPU, where the order of float32 sums differs."""
    return max(tolerance, 1e-4) if device().type == "cuda" else tolerance


def check_same(got: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-6) -> None:
    """Compare the losses of all steps and the gradients of the first step. Check that the loss has changed."""
    tolerance = max(tolerance, 1e-5) if device().type == "cuda" else tolerance
    torch.testing.assert_close(got["losses"], expected["losses"], rtol=10 * tolerance, atol=10 * tolerance)
    assert got["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        assert (got["gradients"][name] - gradient).norm() <= tolerance * gradient.norm(), name
    assert expected["losses"][-1] != expected["losses"][0]


def with_lora(adapters: str) -> Callable[[Any], Any]:
    from peft import LoraConfig, get_peft_model

    def prepare(model: Any) -> Any:
        torch.manual_seed(0)
        settings: dict[str, Any] = {
            "backbone": {"target_modules": ["q_proj"]},
            "head": {"target_modules": ["q_proj", "lm_head"]},
            "modules_to_save": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        }[adapters]
        return get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **settings))

    return prepare


def compare(wrapping: str, loss: str, trained: str = "all", **config: Any) -> None:
    """Compare losses and gradients of a wrapped, patched model with stock in one process.

    Args:
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


def check_fused(model: Any, times: int = STEPS) -> None:
    """Check that flce ran at least `times` times, and that stock code never ran."""
    report = flce.report(model)
    assert report.fused >= times, report
    assert not report.stock, report


# ------------------------------------------------------------------------------------------------ other uses of FSDP2


def mixed_precision(wrapping: str, loss: str) -> None:
    """Check that errors against float64 are not larger than the errors of stock in the same wrapper."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrap = {
        "root": lambda model: _fsdp2(model, mp_policy=policy),
        "tail": lambda model: _tail(model, False, mp_policy=policy),
        "tail, resharded": lambda model: _tail(model, True, mp_policy=policy),
    }[wrapping]
    stock, patched = stock_and_patched()
    exact = copy.deepcopy(stock).double()
    rank, batches = dist.get_rank(), 12  # the error of one loss may be small by chance
    true_losses = [LOSSES[loss](exact, batch(rank, i)).item() for i in range(batches)]
    true_gradients = reference(exact, LOSSES[loss])["gradients"]
    errors = []
    for model in (wrap(stock), wrap(patched)):
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


def _saved_head(model: Any) -> nn.Module:
    saved: nn.Module = model.get_base_model().lm_head.modules_to_save["default"]
    return saved


def add_trl_head(model: Any) -> None:
    from trl.trainer import utils

    import flce.huggingface.trl

    flce.huggingface.trl.make_add_fused_lm_head(utils.add_fused_lm_head, None)(model, outputs=("entropy",))


def trl_loss(model: Any, ids: Tensor, summed: bool = True) -> Tensor:
    outputs = model(input_ids=ids, labels=ids, fused_lm_head=True, summed=summed)
    value: Tensor = -outputs.log_probs.sum() / outputs.label_mask.sum()
    return value


def trl_head(summed: bool, wrapping: str) -> None:
    """Compare TRL's loss with flce's head, trained together with adapters, with stock."""
    stock, patched = (with_lora("modules_to_save")(tiny_llama()) for _ in range(2))
    add_trl_head(patched.get_base_model())
    wrap = {
        "root": _fsdp2,
        "tail, resharded": lambda model: _tail(model, True),
        "head": lambda model: _fsdp2(model, [_saved_head(model)]),  # like PEFT's policy for Accelerate
        "head, resharded": lambda model: _fsdp2(model, [_saved_head(model)], reshard=True),
        "DDP": _ddp,
    }
    loss = functools.partial(trl_loss, summed=summed)
    check_same(train(wrap[wrapping](patched), loss), reference(stock, with_labels))
    check_fused(patched)


def accumulated(loss: str) -> None:
    """Train with four micro-batches in each step, three of them without communication."""
    stock, patched = stock_and_patched()
    results = []
    for model in (_tail(stock, True), _tail(patched, True)):

        def set_sync(last: bool, model: Any = model) -> Any:
            model.set_requires_gradient_sync(last)
            return contextlib.nullcontext()

        results.append(train(model, LOSSES[loss], micro=4, context=set_sync))
    check_same(results[1], results[0])
    check_fused(patched, 4 * STEPS)


class CountCollectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


def collectives(loss: str, wrapping: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return the numbers of collectives of stock and patched in a step."""
    warnings.simplefilter("error", MaterializedLogitsWarning)
    counts = []
    stock, patched = stock_and_patched()
    for model in (WRAPPINGS[wrapping](stock), WRAPPINGS[wrapping](patched)):
        LOSSES[loss](model, batch(0, 0)).backward()
        with CountCollectives() as mode:
            LOSSES[loss](model, batch(0, 1)).backward()
        counts.append(dict(mode.counts))
    return counts[0], counts[1]


def accelerated(loss: str, precision: str) -> None:
    """Compare patched and stock, wrapped like `accelerate launch` with FSDP2 does."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, GradientState

    results = []
    stock, patched = stock_and_patched()
    for model in (stock, patched):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
        )
        accelerator = Accelerator(cpu=device().type == "cpu", mixed_precision=precision, fsdp_plugin=plugin)
        wrapped, optimizer = accelerator.prepare(model, adamw(model))
        results.append(train(wrapped, LOSSES[loss], optimizer, accelerator.backward))
    check_same(results[1], results[0], 1e-6 if precision == "no" else 2e-2)
    check_fused(patched)


def fabric(loss: str, order: str) -> None:
    """Train with Lightning Fabric's DDP: two micro-batches in each step, the first without communication."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator=device().type, devices=2, strategy="ddp")
    fabric.launch()
    results = []
    for kind in ("stock", "patched"):
        model = tiny_llama()
        if kind == "patched" and order == "patched, set up":
            flce.patch_model(model, on_materialize="raise")
        wrapped, optimizer = fabric.setup(model, adamw(model))
        if kind == "patched" and order == "set up, patched":
            flce.patch_model(wrapped, on_materialize="raise")

        def without_sync(last: bool, wrapped: Any = wrapped) -> Any:
            return fabric.no_backward_sync(wrapped, enabled=not last)

        results.append(train(wrapped, LOSSES[loss], optimizer, fabric.backward, micro=2, context=without_sync))
    check_same(results[1], results[0])
    check_fused(wrapped, 2 * STEPS)


def from_transformers(stock: Any, **config: Any) -> Any:
    """Load the model with a ``DistributedConfig``, so that Transformers shards it."""
    import tempfile

    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    paths = [tempfile.mkdtemp()]
    dist.broadcast_object_list(paths)
    if dist.get_rank() == 0:
        stock.save_pretrained(paths[0])
    dist.barrier()
    return AutoModelForCausalLM.from_pretrained(
        paths[0], distributed_config=DistributedConfig(**config), attn_implementation="eager"
    ).train()


def transformers_fsdp(loss: str) -> None:
    stock = tiny_llama()
    model = flce.patch_model(from_transformers(stock, fsdp_size=2))
    check_same(train(model, LOSSES[loss]), reference(stock, LOSSES[loss]))
    check_fused(model)


# -------------------------------------------------------------------------------------------------------- late reads


def check_late_reads(
    model: Any,
    expected: Tensor,
    backward: Callable[[Tensor], Any],
    step: Callable[[], Any],
    rank: int | None = None,
) -> None:
    """Read logits after backward and after the next forward pass. After an optimizer step it is an error.

    ``rank``: the rank whose batch each process has. None: its own rank.
    """
    ids = batch(dist.get_rank() if rank is None else rank, 0)

    def logits_after_backward() -> Tensor:
        outputs = model(input_ids=ids, labels=ids)
        backward(outputs.loss)
        logits: Tensor = outputs.logits
        return logits

    torch.testing.assert_close(logits_after_backward().softmax(-1), expected.softmax(-1))
    logits = logits_after_backward()
    model(input_ids=ids, labels=ids)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    logits = logits_after_backward()
    step()
    with pytest.raises(RuntimeError, match="by an optimizer step"):
        logits.argmax(-1)
    assert not torch.equal(model(input_ids=ids, labels=ids).logits.argmax(-1), expected.argmax(-1))


def late_reads(wrapping: str) -> None:
    stock = tiny_llama()
    patched = flce.patch_model(copy.deepcopy(stock), on_materialize="ignore")
    ids = batch(dist.get_rank(), 0)
    model = WRAPPINGS[wrapping](patched)
    if wrapping == "head, resharded":  # the gathered weight is freed
        assert model(input_ids=ids).logits._state.weight.untyped_storage().size() == 0
        with (
            torch.no_grad(),
            flce.huggingface.lazy_logits(patched),
        ):  # without the model's forward, no hook gathers the head
            late = patched.lm_head(torch.ones(2, 32, device=device()))
        assert late.argmax(-1).shape == (2,)
    step = torch.optim.AdamW(model.parameters(), lr=1e-1, fused=True).step
    check_late_reads(model, stock(input_ids=ids).logits.detach(), Tensor.backward, step)


def evaluated_in_a_wrapper() -> None:
    """Compare logits of an evaluation if the FSDP unit of the head contains the patched model."""
    from peft import LoraConfig, get_peft_model

    stock = tiny_llama()
    reference_model = copy.deepcopy(stock)
    adapted = get_peft_model(flce.patch_model(stock, on_materialize="ignore"), LoraConfig(target_modules=["q_proj"]))
    model = _fsdp2(adapted, reshard_after_forward=True).eval()
    ids = batch(dist.get_rank(), 0)
    with torch.no_grad():
        logits = model(input_ids=ids, labels=ids).logits
        torch.testing.assert_close(logits.softmax(-1), reference_model(input_ids=ids).logits.softmax(-1))


def compiled(part: str, wrapping: str) -> None:
    """Check that the wrappers' hooks run on the outputs of a compiled model."""
    torch._dynamo.reset()
    stock = tiny_llama(num_hidden_layers=1)
    patched = flce.patch_model(copy.deepcopy(stock))
    if part == "the model":
        patched.compile(backend="eager")
    wrapped = WRAPPINGS[wrapping](patched)
    if part == "the wrapper":
        wrapped.compile(backend="eager")
    check_same(train(wrapped, own_loss), reference(stock, own_loss))
    assert flce.report(patched).fused or flce.report(patched).materialized


# ------------------------------------------------------------------------------------------------------------- FSDP1


def _fsdp1(model: Any, original: bool, precision: str, separate_head: bool, strategy: str) -> Any:
    """Wrap decoder layers, the head (if `separate_head`), and the rest of the model."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if precision == "bf16" else None

    def policy(module: nn.Module, recurse: bool, **_: Any) -> bool:
        is_head = separate_head and isinstance(module, nn.Linear) and module.out_features == V
        return recurse or isinstance(module, LlamaDecoderLayer) or is_head

    return FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=policy,
        use_orig_params=original,
        mixed_precision=mixed,
        device_id=device(),
    )


def fsdp1(
    loss: str, original: bool, precision: str, separate_head: bool, strategy: str = "FULL_SHARD"
) -> tuple[dict[str, int], set[str]]:
    """Compare patched and stock in the same wrapper. Check an evaluation, and logits read after backward."""
    results: list[Any] = []
    stock, patched = stock_and_patched()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for model in (stock, patched):
            wrapped = _fsdp1(model, original, precision, separate_head, strategy)
            results.append(train(wrapped, LOSSES[loss]))
    ours = {w.category.__name__ for w in caught if w.category.__module__.startswith("flce")}
    report = flce.report(patched)
    tolerance = rounding(1e-5 if precision == "no" else 5e-2)
    torch.testing.assert_close(results[1], results[0], rtol=tolerance, atol=tolerance)
    assert results[0]["losses"][-1] != results[0]["losses"][0]
    ids = batch(dist.get_rank(), 0)
    with torch.no_grad():
        assert wrapped(input_ids=ids, labels=ids).logits.argmax(-1).shape == ids.shape
    outputs = wrapped(input_ids=ids, labels=ids)
    best = outputs.logits.argmax(-1)
    outputs.loss.backward()
    assert torch.equal(outputs.logits.argmax(-1), best)
    assert wrapped(input_ids=ids, labels=ids).loss == outputs.loss
    return {"fused": report.fused, "stock": sum(report.stock.values())}, ours


def peaks_of_fsdp2(config: Any, length: int) -> list[int]:
    """Return the peak memory in bytes of some training steps, above the memory before."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config).train()
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    wrapped = _fsdp2(flce.patch_model(model))
    ids = torch.randint(3, 100, (1, length))
    peaks = []
    for _ in range(3):
        peaks.append(flce.profile_memory(lambda: with_labels(wrapped, ids).backward(), device="cpu").peak)
        model.zero_grad()
    return peaks


def data_parallel() -> int:
    """Train with `nn.DataParallel` in the first process. Return the peak memory in bytes above the weights."""
    if dist.get_rank() > 0:
        return 0
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
    return peak
