"""What the processes of the distributed tests run: a small model, wrapped and trained, stock or patched."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import flce
from flce.huggingface import MaterializedLogitsWarning

V, STEPS = 97, 4


def tiny_llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "vocab_size": V,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        **changes,
    }
    torch.manual_seed(0)
    config: Any = LlamaConfig(**settings)
    config._attn_implementation = "eager"
    return LlamaForCausalLM(config).train()


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(3, V, (2, 9), generator=generator)


# ------------------------------------------------------------------------------------------------------------ losses


def shifted(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()


def with_labels(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def own_loss(model: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(*shifted(model(input_ids=ids).logits, ids))


def smoothed(model: Any, ids: Tensor) -> Tensor:
    """As Trainer's label smoother has it."""
    logits, target = shifted(model(input_ids=ids).logits, ids)
    log_probs = -F.log_softmax(logits, dim=-1)
    nll = log_probs.gather(-1, target[:, None]).mean()
    return 0.9 * nll + 0.1 * log_probs.sum(-1, keepdim=True).mean() / V


def z_loss(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits
    return F.cross_entropy(*shifted(logits, ids)) + 0.1 * logits.logsumexp(-1).square().mean()


def real_logits(model: Any, ids: Tensor) -> Tensor:
    """An operation without a lazy form, on a view."""
    logits, target = shifted(model(input_ids=ids).logits, ids)
    return F.cross_entropy(logits, target) + logits.softmax(-1).square().sum()


def asked_for(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits
    logits = logits.materialize() if hasattr(logits, "materialize") else logits
    return F.cross_entropy(*shifted(logits, ids))


def two_losses(model: Any, ids: Tensor) -> Tensor:
    outputs = model(input_ids=ids, labels=ids)
    return outputs.loss + 0.5 * F.cross_entropy(outputs.logits[:, 1:].flatten(0, 1), ids[:, :-1].flatten())


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "labels": with_labels,
    "own loss": own_loss,
    "smoothed": smoothed,
    "z-loss": z_loss,
    "real logits": real_logits,
    "asked for": asked_for,
    "two losses": two_losses,
}


# ---------------------------------------------------------------------------------------------------------- wrapping


def _fsdp2(model: Any, *units: list[nn.Module], reshard: bool | None = None, **kwargs: Any) -> Any:
    """Decoder layers, ``units`` and the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    kwargs.setdefault("mesh", init_device_mesh(DEVICE.type, (dist.get_world_size(),)))
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


def _alone(model: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh(DEVICE.type, (dist.get_world_size(),)))


def _ddp(model: Any, **kwargs: Any) -> Any:
    return nn.parallel.DistributedDataParallel(model, **kwargs)


WRAPPINGS: dict[str, Callable[[Any], Any]] = {
    "root": _fsdp2,
    "root, resharded": lambda model: _root_resharded(model),
    "fully_shard(model)": _alone,
    "tail": lambda model: _tail(model, False),
    "tail, resharded": lambda model: _tail(model, True),
    "head": lambda model: _fsdp2(model, [model.lm_head], reshard=False),
    "head, resharded": lambda model: _fsdp2(model, [model.lm_head], reshard=True),
    "DDP": _ddp,
    "DDP, static graph": lambda model: _ddp(model, static_graph=True),
    "DDP, unused parameters": lambda model: _ddp(model, find_unused_parameters=True),
}


def _root_resharded(model: Any) -> Any:
    model = _fsdp2(model)
    model.set_reshard_after_forward(True, recurse=False)
    return model


DEVICE = torch.device("cpu")


# ---------------------------------------------------------------------------------------------------------- training


def full(tensor: Tensor) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def train(model: Any, loss: Callable[[Any, Tensor], Tensor]) -> dict[str, Any]:
    """This rank's losses over some optimizer steps, and the first step's gradients."""
    rank = dist.get_rank()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)
    losses, gradients = [], {}
    for step in range(STEPS):
        value = loss(model, batch(rank, step))
        value.backward()
        if step == 0:
            named = [(n.removeprefix("module."), p.grad) for n, p in model.named_parameters()]
            gradients = {name: full(grad) for name, grad in named if grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return {"losses": losses, "gradients": gradients}


def reference(model: Any, loss: Callable[[Any, Tensor], Tensor]) -> dict[str, Any]:
    """The same in one process that has the batches of all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
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


def compare(wrapping: str, loss: str, tied: bool = False, **kwargs: Any) -> dict[str, int]:
    """Train wrapped and patched, and in one process; the errors are the test's."""
    warnings.simplefilter("ignore" if loss == "real logits" else "error", MaterializedLogitsWarning)
    stock = tiny_llama(tie_word_embeddings=tied)
    patched = flce.patch_model(copy.deepcopy(stock))
    want = reference(stock, LOSSES[loss])
    got = train(WRAPPINGS[wrapping](patched), LOSSES[loss])
    torch.testing.assert_close(got["losses"], want["losses"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got["gradients"], want["gradients"], rtol=1e-5, atol=1e-6)
    assert want["losses"][-1] < want["losses"][0]
    report = flce.report(patched)
    counts = {"materialized": report.materialized, "stock": report.stock}
    return {"fused": report.fused, **{name: sum(of.values()) for name, of in counts.items()}}
