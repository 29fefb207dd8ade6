"""Scripts: code of users that runs on a stock model and on a patched model. Both runs have to note equal values.

A script uses the names of its test file, `TOOLS`, and the methods of `Run`. ``patched`` is True in the run with the
patched model, and ``calls`` are the calls of the fused function. Expectations about the patched run are calls in the
script: ``fused(1)``, ``lazy(logits)``.
"""

from __future__ import annotations

import copy
import inspect
import io
import linecache
import pickle
import textwrap
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flce
from flce.huggingface import LazyLogits, is_patched
from flce.huggingface.lazy import is_lazy

V = 97
IDS = torch.randint(3, V, (2, 9), generator=torch.Generator().manual_seed(1))
Build = Callable[..., Any]
Calls = list[dict[str, Any]]
Compare = Callable[..., Any]


def batch(padding: bool = False, **more: Any) -> dict[str, Any]:
    mask, labels = torch.ones_like(IDS), IDS.clone()
    if padding:
        mask[1, 6:] = 0
        labels[mask == 0] = -100
        labels[:, :2] = -100
    return {"input_ids": IDS, "attention_mask": mask, "labels": labels, **more}


def loss_of(logits: Tensor, **options: Any) -> Tensor:
    """Compute the loss of the next token as a training loop does."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten(), **options)


def own_loss(model: Any, **inputs: Any) -> Tensor:
    return loss_of(model(input_ids=IDS, **inputs).logits)


def loaded(model: Any) -> Any:
    """Return the model after `torch.save` and `torch.load`."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class Around(nn.Module):
    """A wrapper of a model, whose forward is a function."""

    def __init__(self, inner: Any, run: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.inner, self.run = inner, run
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.inner, *args, **kwargs)


class Wrapper(Around):
    """A wrapper with `get_output_embeddings`, as PEFT's models have."""

    def get_output_embeddings(self) -> Any:
        return self.inner.get_output_embeddings()


TOOLS = {
    "torch": torch,
    "F": F,
    "nn": nn,
    "Tensor": Tensor,
    "copy": copy,
    "pickle": pickle,
    "inspect": inspect,
    "warnings": warnings,
    "raises": pytest.raises,
    "warns": pytest.warns,
    "importorskip": pytest.importorskip,
    "checkpoint": checkpoint,
    "flce": flce,
    "LazyLogits": LazyLogits,
    "is_patched": is_patched,
    "is_lazy": is_lazy,
    "V": V,
    "IDS": IDS,
    "batch": batch,
    "loss_of": loss_of,
    "own_loss": own_loss,
    "loaded": loaded,
    "Around": Around,
    "Wrapper": Wrapper,
}


class Run:
    """One run of a script. Its ``model`` is the one whose gradients are compared."""

    def __init__(self, patched: bool, calls: Calls, given: dict[str, Any]) -> None:
        self.patched, self.calls = patched, calls
        self.notes: list[tuple[Any, float]] = []
        methods = (self.patch, self.unpatch, self.note, self.backward, self.step, self.fused, self.lazy)
        self.names = {**TOOLS, **given, "patched": patched, "calls": calls, **{each.__name__: each for each in methods}}

    def patch(self, model: Any, **options: Any) -> Any:
        return flce.patch_model(model, **options) if self.patched else model

    def unpatch(self, model: Any) -> Any:
        return flce.unpatch_model(model) if self.patched else model

    def note(self, *values: Any, tolerance: float = 1e-5) -> None:
        """Note values that have to be equal in both runs."""
        self.notes.append((plain(values), tolerance))

    def backward(self, loss: Tensor, tolerance: float = 1e-5) -> None:
        """Run backward. Note the loss, all gradients and buffers."""
        model = self.names["model"]
        model.zero_grad()
        if loss.requires_grad:
            loss.backward()
        self.note(loss, {n: (p.requires_grad, p.grad) for n, p in model.named_parameters()}, tolerance=tolerance)
        self.note(dict(model.named_buffers()))

    def step(self, **inputs: Any) -> Any:
        """Run a training step with labels. Note the outputs too."""
        torch.manual_seed(11)  # of dropout
        outputs = self.names["model"](**{**batch(), **inputs})
        if self.patched and self.calls:
            self.lazy(outputs.logits)
        self.backward(outputs.loss)
        self.note(outputs)
        return outputs

    def fused(self, number: int) -> None:
        """Assert the number of calls of the fused function since the last `fused`."""
        assert len(self.calls) == (number if self.patched else 0)
        self.calls.clear()

    def lazy(self, *tensors: Any) -> None:
        """Assert that the tensors of the patched run are lazy logits that were not computed."""
        for tensor in tensors if self.patched else ():
            assert is_lazy(tensor)
            assert not tensor.is_materialized


def plain(value: Any) -> Any:
    """Copy nested values. Lazy logits become real, and objects that are not tensors become their class."""
    if is_lazy(value):
        return value.materialize().detach().clone()
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    return value if isinstance(value, bool | int | float | str | torch.dtype | type | None) else type(value)


def assert_same(got: Any, want: Any, tolerance: float, what: str) -> None:
    if isinstance(want, Tensor):
        torch.testing.assert_close(
            got, want, rtol=tolerance, atol=tolerance, equal_nan=True, msg=f"{what}: {{}}".format
        )
    elif isinstance(want, dict | list):
        keys, theirs = (list(each) if isinstance(each, dict) else range(len(each)) for each in (got, want))
        assert keys == theirs, what
        for key in keys:
            assert_same(got[key], want[key], tolerance, f"{what}, {key}")
    else:
        assert got == want, what


def run(script: str, patched: bool, calls: Calls, given: dict[str, Any]) -> Run:
    code = textwrap.dedent(script).strip()
    file = f"<script {abs(hash(code))}>"
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    torch.manual_seed(0)
    calls.clear()
    this = Run(patched, calls, given)
    exec(compile(code, file, "exec"), this.names)
    return this


def compare(script: str, calls: Calls, given: dict[str, Any]) -> tuple[Run, Run]:
    """Run the script on both models. Return both runs."""
    stock, patched = (run(script, which, calls, given) for which in (False, True))
    assert len(patched.notes) == len(stock.notes)
    for i, ((got, _), (want, tolerance)) in enumerate(zip(patched.notes, stock.notes, strict=True), 1):
        assert_same(got, want, tolerance, f"note {i}")
    return stock, patched
