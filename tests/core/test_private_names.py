"""Private names are in one table. Importing flce needs none, and a patched model trains as stock without any one."""

from __future__ import annotations

import ast
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

import flce
from flce.core import private
from tests.processes import run_python

PACKAGE = Path(flce.__file__).parent

# Private names, or fields, that are used without a fallback, and the reason.
DOCUMENTED: dict[str, str] = {
    "torch._C.DisableTorchFunctionSubclass": "the notes of PyTorch on extending it",
    "torch._dynamo.graph_break": "the reference of torch.compile",
    "torch.utils._python_dispatch.TorchDispatchMode": "the notes of PyTorch on extending it; only `flce plan` uses it",
    "torch.utils._pytree.tree_map_only": "used with that mode; only `flce plan` uses it",
    "torch.utils._pytree.tree_leaves": "used with that mode; only `flce plan` uses it",
    "_base": "the notes of PyTorch on views",
    "_version": "the notes of PyTorch on autograd",
    "_raw_saved_result": "the notes of PyTorch on autograd; may be missing",
    "_cdata": "of storages: PyTorch compares storages by this field",
    "_modules": "of a module: a field that all libraries use",
    "_parameters": "of a module: a field that all libraries use",
    "_forward_pre_hooks": "of a module: a field that all libraries use",
    "_backward_hooks": "of tensors: a field that PyTorch and DDP read",
    "_post_accumulate_grad_hooks": "the same",
    "_state_ctx": "of FSDP2's state; may be missing",
    "ds_id": "of DeepSpeed's parameters: Transformers and PEFT read it, too",
    "ds_status": "the same",
    "pre_bwd_fn": "of a module under DeepSpeed ZeRO-3: function applied to the outputs; may be missing",
    "post_bwd_fn": "of a module under DeepSpeed ZeRO-3: function applied to the inputs; may be missing",
    "_is_replica": "of modules that nn.DataParallel copied; may be missing",
    "_old_forward": "of modules that Accelerate changed; may be missing",
    "_grouped_mm": "an operator of newer versions; may be missing",
    "_getframe": "Python's own",
    "_forward_impl": "of Megatron's linear layers, whose subclasses override it",
    "_fields": "of named tuples, Python's own",
    "_make": "of named tuples, Python's own",
    "_asdict": "of named tuples, Python's own",
    "_dynamo_marked_constant": "set, not read: torch.compiler.assume_constant_result sets it, too",
    "_log_softmax_backward_data": "an operator of ATen, whose schemas stay stable for saved programs",
    "_softmax_backward_data": "the same",
    "_scaled_mm": "the same",
    "_local_scalar_dense": "the same",
    "_scaled_dot_product_efficient_attention": "the same",
    "_scaled_dot_product_flash_attention": "the same",
    "_scaled_dot_product_flash_attention_backward": "the same",
}


def test_nothing_else_is_private() -> None:
    """Each attribute or import with an underscore is defined by flce, in the table, or documented."""
    trees = {file: ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py")}
    own = set(DOCUMENTED) | {"_flce"}  # attribute that patch_model sets on a model
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own.add(node.attr)
    found = []
    for file, tree in trees.items():
        if file.name == "private.py":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in own:
                path = ast.unparse(node)
                if not path.startswith("private.") and not any(name.startswith(path) for name in DOCUMENTED):
                    found.append(f"{file.name}:{node.lineno} {path}")
            elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("flce"):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                found += [name for name in names if _is_private(name) and name not in DOCUMENTED]
    assert found == []


def _is_private(path: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in path.split("."))


def test_this_version_has_them() -> None:
    importlib.import_module("torch.distributed.fsdp")
    assert private.incomplete_entries() == []


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    # On a machine with GPUs autograd starts threads, and a process with threads cannot be forked.
    env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = run_python("-m", "tests.without_private_names", *private.NAMES, env=env)
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


@pytest.mark.parametrize("name", private.NAMES)
def test_without(name: str, outcomes: dict[str, Any]) -> None:
    """The import looks up no name; losses and gradients equal stock's; one warning has the consequence."""
    outcome, entry = outcomes[name], private.NAMES[name]
    assert "error" not in outcome, outcome["error"]
    assert outcome["early"] == []
    assert outcome["values"] == pytest.approx(outcome["stock"], rel=1e-5)
    (warning,) = outcome["said"]
    assert entry.effect in warning
    assert entry.paths.split()[0] in warning


REFUSED = [name for name, entry in private.NAMES.items() if entry.effect.endswith("raises RuntimeError")]


@pytest.mark.parametrize("name", REFUSED)
def test_names_without_a_fallback_raise(name: str) -> None:
    with pytest.raises(RuntimeError, match="which this version of PyTorch does not have"):
        private.NAMES[name].fallback()
