"""Tests of docs/migrate.md: tables have every argument of the original, and replacements have equal results.

tests/ops compares with PyTorch's function. Other libraries are tested if they are installed:
``pip install --no-deps liger-kernel==0.8.5 cut-cross-entropy==25.1.1``. Without a GPU Liger's loss runs in Triton's
interpreter, except `softcap` and `ce_weight`. These two options and Liger's layers need a GPU.
"""

from __future__ import annotations

import ast
import copy
import fnmatch
import functools
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flce
from tests.helpers import REDUCTIONS, assert_near

TEXT = (Path(__file__).parents[2] / "docs" / "migrate.md").read_text()
TORCH = "torch.nn.functional.linear_cross_entropy"
LIGER = "liger_kernel.transformers.LigerFusedLinearCrossEntropyLoss"
CCE, CCE_MODELS = "cut_cross_entropy.linear_cross_entropy", "cut_cross_entropy.transformers"
TRL = "trl.kernels.chunked_logprob.ChunkedLogProbFunction"


@pytest.fixture(autouse=True)
def _quick(monkeypatch, device):
    """Use PyTorch on a CPU, and run `impl="torch_compile"` of CCE without compilation."""
    if device.type == "cpu":
        monkeypatch.setenv("FLCE_BACKEND", "torch")
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


# ------------------------------------------------------------------------------------------------- the tables


def read_tables() -> dict[str, tuple[str, list[tuple[set[str], str, bool]]]]:
    """Return for each original its replacement and the rows: arguments, replacement, and True if not in the wheel."""
    found = {}
    for block in re.findall(r"(?:^\|.*\n)+", TEXT, re.M):
        head, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines())
        if re.fullmatch(r"`[a-z_]+\.[\w.*]+`", head[0]):
            rows = [(set(re.findall(r"`([^`]+)`", line[0])), line[1], line[0].endswith("(git)")) for line in lines]
            found[head[0].strip("`")] = (head[1].strip("`"), rows)
    return found


TABLES = read_tables()


def resolve(path: str) -> Any:
    """Return the object at a path. Attributes precede modules of the same name, unlike in `pkgutil.resolve_name`."""
    first, *rest = path.split(".")
    found: Any = importlib.import_module(first)
    for number, name in enumerate(rest, 2):
        if not hasattr(found, name):
            importlib.import_module(".".join([first, *rest][:number]))
        found = getattr(found, name)
    return found


def original(path: str) -> Any:
    """Return the object at a path, or skip the test if its package is not installed."""
    if path.startswith("torch."):
        if not hasattr(F, "linear_cross_entropy"):
            pytest.skip(f"PyTorch {torch.__version__} has no linear_cross_entropy: it needs 2.13 or newer")
    else:  # cce_patch needs an old version of Transformers
        pytest.importorskip(CCE_MODELS if path.startswith(CCE_MODELS) else path.split(".")[0], exc_type=ImportError)
    return resolve(path)


def parameters(function: Any) -> set[str]:
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {p.name for p in inspect.signature(function).parameters.values() if p.kind not in variable} - {"self", "ctx"}


@pytest.mark.parametrize("path", TABLES)
def test_every_argument_has_a_row(path):
    """Check that rows and arguments are equal."""
    assert len(TABLES) == 9
    folder, _, last = path.rpartition(".")
    owner = original(folder)
    names = fnmatch.filter({*dir(owner), *getattr(owner, "__all__", ())}, last)
    assert len(names) == 1 or ("*" in last and len(names) > 20)
    existing = set().union(*(parameters(getattr(owner, name)) for name in names))
    _, rows = TABLES[path]
    assert existing <= set().union(*(names for names, _, _ in rows))
    assert set().union(*(names for names, _, in_git in rows if not in_git)) <= existing


@pytest.mark.parametrize("path", TABLES)
def test_replacements_exist(path):
    """Check the second column: arguments of flce, with or without a value, or calls of flce."""
    name, rows = TABLES[path]
    ours = parameters(resolve(name))
    if name == "flce.LinearCrossEntropyLoss":  # passes arguments on
        ours |= parameters(flce.FusedLinearCrossEntropyLoss)
    for _, text, _ in rows:
        spans = re.findall(r"`([^`]+)`", text)
        assert spans or text == "none", text
        for span in spans:
            call: Any = ast.parse(f"f({span})", mode="eval").body
            named = {argument.id for argument in call.args if isinstance(argument, ast.Name)}
            assert named | {keyword.arg for keyword in call.keywords} <= ours, span
            for node in ast.walk(call):
                if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("flce."):
                    resolve(ast.unparse(node))
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "ChunkOptions":
                    assert {keyword.arg for keyword in node.keywords} <= parameters(flce.ChunkOptions), span


def test_problems_name_their_threads():
    threads = re.findall(r"#(\d+)\]\(https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/(\d+)\)", TEXT)
    assert len(threads) >= 12
    assert [text for text, number in threads if text != number] == []


# ------------------------------------------------------------------------- each argument, compared to the original

N, H, V = 14, 8, 30
GENERATOR = torch.Generator().manual_seed(3)
INPUT, WEIGHT, BIAS = (torch.randn(*s, generator=GENERATOR, dtype=torch.float64) for s in ((N, H), (V, H), (V,)))
CLASS_WEIGHT = torch.rand(V, generator=GENERATOR, dtype=torch.float64) + 0.2
TARGET = torch.randint(V, (N,), generator=GENERATOR)
TARGET[[2, 9]] = -100


def outcome(call, device, target=TARGET, bias: Any = BIAS, dtype=torch.float32, **arguments) -> dict[str, Any]:
    """Run ``call(input, weight, target, bias, **arguments)``. Return the loss and the gradients."""
    tensors = {"input": INPUT, "weight": WEIGHT} | ({} if bias is None else {"bias": bias})
    leaves = {name: tensor.to(device, dtype, copy=True).requires_grad_() for name, tensor in tensors.items()}
    moved = {k: v.to(device, dtype) if isinstance(v, Tensor) else v for k, v in arguments.items()}
    loss = call(leaves["input"], leaves["weight"], target.to(device), leaves.get("bias"), **moved)
    # Tokens have different upstream gradients: the test then finds gradients that are all scaled by one of them.
    loss.backward(torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype, device=device).view_as(loss))
    return {"loss": loss.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def liger(x, w, y, b, **arguments):
    return original(LIGER)(**arguments)(w, x, y, b)


def fused(x, w, y, b, **arguments):
    return flce.FusedLinearCrossEntropyLoss(**arguments)(x, w, y, b)


def cce(x, w, y, b, **arguments):
    """Run CCE on sequences: it shifts along the last dimension of the targets."""
    return original(CCE)(x.view(2, 7, H), w, y.view(2, 7), impl="torch_compile", **arguments)


def fused_sequences(x, w, y, b, **arguments):
    loss = flce.fused_linear_cross_entropy(x.view(2, 7, H), w, y.view(2, 7), **arguments)
    # CCE does not return the last token of a sequence.
    return loss[:, :-1] if loss.dim() and "shift" in arguments else loss


Z_LOSS = {"lse_square_scale": 0.1}, {"z_loss": 0.1}
FLOAT32_SUMS: dict[str, Any] = {"accum_dtype": torch.float32}
OF_CCE = [{}, {"ignore_index": 7}, {"softcap": 2.0}]
OF_LIGER = [{}, {"ignore_index": 7}, {"label_smoothing": 0.2}]
CASES = [
    *((LIGER, case, case) for case in OF_LIGER),
    (LIGER, *Z_LOSS),
    (LIGER, FLOAT32_SUMS, {"options": flce.ChunkOptions(chunk_rows=4, **FLOAT32_SUMS)}),
    # These use functions that the interpreter does not have.
    pytest.param(LIGER, {"softcap": 2.0}, {"softcap": 2.0}, marks=pytest.mark.gpu),
    pytest.param(LIGER, {"ce_weight": CLASS_WEIGHT}, {"weight": CLASS_WEIGHT}, marks=pytest.mark.gpu),
    *((CCE, case, case) for case in OF_CCE),
    (CCE, {"shift": True}, {"shift": 1}),
]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("path, theirs, ours", CASES)
def test_an_argument(path, theirs, ours, reduction, device):
    call, replacement = (liger, fused) if path == LIGER else (cce, fused_sequences)
    case = {"target": TARGET.clamp(min=7) if "ignore_index" in theirs else TARGET, "reduction": reduction}
    case["bias"] = BIAS if path == LIGER and theirs else None
    got = outcome(replacement, device, **case, **ours)
    assert got["loss"].dtype == torch.float32
    for name, expected in outcome(call, device, **case, **theirs).items():
        assert_near(got[name], expected.double(), 1e-5, name)


def test_log_probabilities_of_trl(device):
    """Compare both results, and the gradients of their sum."""
    x, w = (t.to(device, torch.float32).requires_grad_() for t in (INPUT, WEIGHT))
    y, upstream = TARGET.to(device).clamp(min=0), torch.arange(N, device=device)
    theirs = original(TRL).apply(x, w, None, y, 0.7, 16, 20.0, 0.5, ("entropy",))[:2]
    out: Any = flce.linear_logprobs(x, w, y, temperature=0.7, softcap=20.0, logit_scale=0.5)
    pairs = theirs, (out.logprob, out.entropy)
    results = [(*pair, *torch.autograd.grad((pair[0] * upstream - pair[1]).sum(), (x, w))) for pair in pairs]
    for expected, got in zip(*results, strict=True):
        assert_near(got.detach(), expected.detach().double(), 1e-5, "")


# ------------------------------------------------------------------------------------------ before and after

BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)
CHANGES = r"^(flce\.patch_model|apply_liger).*\n"
LAYERS = re.compile("apply_liger_kernel_to_llama")  # do not run in the interpreter
STOCK = """
import torch.nn.functional as F
losses = F.cross_entropy(F.linear(hidden[:, :-1], W).flatten(0, 1).float(), targets[:, 1:].flatten(), reduction="none")
loss = losses.sum() / (targets[:, 1:] != -100).sum()
"""


@pytest.mark.parametrize("block", [pytest.param(b, marks=pytest.mark.gpu if LAYERS.search(b) else ()) for b in BLOCKS])
def test_a_block(block: str, device, monkeypatch):
    """Compare the `loss` of a block, and its gradients, with stock operators or with a stock model."""
    assert [each.splitlines()[0] for each in BLOCKS] == ["# before", "# after"] * 4
    for package in re.findall(r"^from (cut_cross_entropy|liger_kernel)", block, re.M):
        pytest.importorskip(package, exc_type=ImportError)
    if "LinearCrossEntropyOptions" in block:
        original(TORCH)
    if "from cut_cross_entropy" in block and device.type == "cpu":
        monkeypatch.setattr(CCE, functools.partial(original(CCE), impl="torch_compile"))
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes)).train().to(device)
    ids = torch.randint(64, (4, 9), device=device)
    # CCE's kernels support only half precision.
    rounded = "from cut_cross_entropy" in block and device.type == "cuda"
    results = []
    for code in (re.sub(CHANGES, "", block, flags=re.M) if "model" in block else STOCK, block):
        names: dict[str, Any] = {"input_ids": ids, "labels": ids, "model": copy.deepcopy(model)}
        names["targets"] = TARGET.to(device).view(2, 7)
        for name, tensor in (("hidden", INPUT.view(2, 7, H)), ("W", WEIGHT)):
            names[name] = tensor.to(device, torch.bfloat16 if rounded else torch.float32, copy=True).requires_grad_()
        exec(code, names)
        leaves = [names["hidden"], names["W"], *names["model"].parameters()]
        loss = torch.as_tensor(names["loss"])
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else ()
        results.append([loss.detach(), *(gradient for gradient in gradients if gradient is not None)])
    assert len(results[0]) == len(results[1])
    for expected, got in zip(*results, strict=True):
        assert_near(got, expected.double(), 2e-2 if rounded else 1e-4 if "model" in block else 1e-5, block)
