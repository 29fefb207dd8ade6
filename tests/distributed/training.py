"""A small model, wrapped and trained in the processes of the distributed tests, stock or patched."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import flce
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


def fsdp2(model: Any, *units: list[nn.Module], reshard: bool | None = None, **kwargs: Any) -> Any:
    """Wrap decoder layers, ``units`` and the rest of the model."""
    from torch.distributed.fsdp import fully_shard

    kwargs.setdefault("mesh", _mesh())
    core = model.get_base_model() if hasattr(model, "get_base_model") else model
    for layer in core.model.layers:
        fully_shard(layer, **kwargs)
    for unit in units:
        fully_shard(unit if len(unit) > 1 else unit[0], reshard_after_forward=reshard, **kwargs)
    return fully_shard(model, **kwargs)


def tail(model: Any, reshard: bool, **kwargs: Any) -> Any:
    core = model.get_base_model() if hasattr(model, "get_base_model") else model
    tied = core.model.embed_tokens.weight is core.lm_head.weight
    embedding = [core.model.embed_tokens] if tied else []
    return fsdp2(model, [core.model.norm, *embedding, core.lm_head], reshard=reshard, **kwargs)


def ddp(model: Any, **kwargs: Any) -> Any:
    return nn.parallel.DistributedDataParallel(model, **kwargs)


def _without_units(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=_mesh())


def _root_resharded(model: Any) -> Any:
    model = fsdp2(model)
    model.set_reshard_after_forward(True, recurse=False)
    return model


def _offloaded(model: Any) -> Any:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return tail(model, True, offload_policy=CPUOffloadPolicy(pin_memory=False))


def _hybrid(model: Any) -> Any:
    """Wrap with HSDP: two replicas of two shards."""
    from torch.distributed.device_mesh import init_device_mesh

    return tail(model, True, mesh=init_device_mesh(device().type, (2, 2), mesh_dim_names=("replicate", "shard")))


WRAPPINGS: dict[str, Callable[[Any], Any]] = {
    "root": fsdp2,
    "root, resharded": _root_resharded,
    "fully_shard(model)": _without_units,
    "tail": lambda model: tail(model, False),
    "tail, resharded": lambda model: tail(model, True),
    "head": lambda model: fsdp2(model, [model.lm_head], reshard=False),
    "head, resharded": lambda model: fsdp2(model, [model.lm_head], reshard=True),
    "DDP": ddp,
    "DDP, static graph": lambda model: ddp(model, static_graph=True),
    "DDP, unused parameters": lambda model: ddp(model, find_unused_parameters=True),
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
    own: int | None = None,
    ranks: Iterable[int] | None = None,
) -> dict[str, Any]:
    """Return the losses of this rank over some optimizer steps, and the gradients of the first step.

    Args:
        model: the model to train.
        loss: the loss of the model and a batch.
        optimizer: the optimizer. None: AdamW.
        backward: the function that runs the backward pass of a loss.
        micro: the number of micro-batches of a step.
        context: returns the context of a micro-batch. Its argument is True for the last micro-batch of a step.
        own: the rank whose batches this process has. None: its own.
        ranks: the model in one process trains on the batches of these ranks. None: of `own`.
    """
    optimizer, own = optimizer or adamw(model), dist.get_rank() if own is None else own
    ranks = [own] if ranks is None else list(ranks)
    losses, gradients = [], {}
    for step in range(STEPS):
        for k, rank in itertools.product(range(micro), ranks):
            with context(k == micro - 1):
                value = loss(model, batch(rank, micro * step + k)) / micro
                backward(value if len(ranks) == 1 else value / len(ranks))
            if rank == own:
                losses.append(gather_full(value).item())
        if step == 0:
            named = [(n.removeprefix("module."), p.grad) for n, p in model.named_parameters()]
            gradients = {name: gather_full(grad) for name, grad in named if grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "gradients": gradients}


def reference(model: Any, loss: Callable[[Any, Tensor], Tensor]) -> dict[str, Any]:
    """Return the results of `train` in one process that has the batches of all ranks."""
    return train(model, loss, ranks=range(dist.get_world_size()))


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
    pytest.importorskip("peft")
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


def check_fused(model: Any, times: int = STEPS) -> None:
    """Check that flce ran at least `times` times, and that stock code never ran."""
    report = flce.report(model)
    assert report.fused >= times, report
    assert not report.stock, report


def add_trl_head(model: Any) -> None:
    pytest.importorskip("trl", minversion="1.16", reason="it is in the extra `trainers`")
    from trl.trainer import utils

    import flce.huggingface.trl

    flce.huggingface.trl.make_add_fused_lm_head(utils.add_fused_lm_head, None)(model, outputs=("entropy",))


def trl_loss(model: Any, ids: Tensor, summed: bool = True) -> Tensor:
    outputs = model(input_ids=ids, labels=ids, fused_lm_head=True, summed=summed)
    value: Tensor = -outputs.log_probs.sum() / outputs.label_mask.sum()
    return value


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


def check_late_reads(
    model: Any, expected: Tensor, backward: Callable[[Tensor], Any], step: Callable[[], Any], rank: int | None = None
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


class LastStage(nn.Module):
    """Model of hidden states whose output is a tensor: the last stage of a pipeline, or a model of pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.lm_head = nn.Linear(32, 32), nn.Linear(32, V, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.layer(hidden).tanh())
