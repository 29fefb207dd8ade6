"""A script that trains a patched model without one private name of another library, each name in a separate process.

`tests/core/test_private_names.py` runs it with names of `flce.core.private.NAMES`. It prints the results as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
import warnings
from typing import Any

import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.nn.functional as F
import transformers
from torch import Tensor

import flce
import flce.huggingface
from flce.core import private

IDS = torch.randint(331, (2, 7), generator=torch.Generator().manual_seed(1))
COMPILER_NAMES = ("skip_frames", "current_translator", "is_exporting", "compiled_call")


class Hooks:
    def method(self, grad: Tensor) -> None: ...


def build() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=331, num_hidden_layers=1, **sizes))


def own_loss(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())


def results(model: Any, compiled: bool) -> list[float]:
    """Return losses and norms of gradients with labels, with the user's own loss, and with a hook on the logits; then
    the loss and the norm of the logits without gradients."""

    def hooked() -> Tensor:
        logits = model(input_ids=IDS).logits
        logits.register_hook(Hooks().method)
        return own_loss(logits)

    losses = [lambda: model(input_ids=IDS, labels=IDS).loss, lambda: own_loss(model(input_ids=IDS).logits), hooked]
    if compiled:
        graphs = torch.compile(model, backend="eager")
        losses.append(lambda: own_loss(graphs(input_ids=IDS).logits))
    values = []
    for loss_of in losses:
        model.zero_grad()
        loss = loss_of()
        loss.backward()
        weights = (model.lm_head.weight, model.model.embed_tokens.weight)
        values += [loss.item(), *[weight.grad.norm().item() for weight in weights]]
    with torch.no_grad():
        return [*values, model(input_ids=IDS, labels=IDS).loss.item(), model(input_ids=IDS).logits.norm().item()]


def train_without(name: str) -> dict[str, Any]:
    """Train in a process in which only this name is missing, and return the results.

    "early" lists the names that the import of flce has looked up.
    """
    early = [other for other in private.NAMES if other in vars(private)]
    entry, find = private.NAMES[name], private.resolve_path

    def find_others(path: str) -> Any:
        if path in entry.paths.split():
            raise AttributeError(path)
        return find(path)

    private.resolve_path = find_others
    if entry.required_module is not None:
        sys.modules.setdefault(entry.required_module, torch)  # as if it had been imported
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patched = flce.patch_model(build(), on_materialize="ignore")
        values = results(patched, name in COMPILER_NAMES)
        hidden, weight = torch.randn(5, 16, requires_grad=True), torch.randn(331, 16, requires_grad=True)
        flce.fused_linear_cross_entropy(hidden, weight, IDS[0, :5]).backward()
        getattr(private, name)  # some names are for features that this training does not use
    said = [str(warning.message) for warning in caught if "A newer version of flce" in str(warning.message)]
    return {"early": early, "values": values, "said": said}


def run_in_child(name: str) -> dict[str, Any]:
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            result = train_without(name)
        except BaseException:
            result = {"error": traceback.format_exc()}
        os.write(write, json.dumps(result).encode())
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        text = pipe.read()
    os.wait()
    answer: dict[str, Any] = json.loads(text or '{"error": "the process died"}')
    return answer


if __name__ == "__main__":
    stock = {compiled: results(build(), compiled) for compiled in (False, True)}
    gc.freeze()  # collections in the children do not copy its memory
    print(json.dumps({name: {**run_in_child(name), "stock": stock[name in COMPILER_NAMES]} for name in sys.argv[1:]}))
