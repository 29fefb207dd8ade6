"""Tests of docs/migrate.md: tables have every argument of the original, and replacements have equal results.

tests/ops compares with PyTorch's function. Other libraries are tested if they are installed:
``pip install --no-deps liger-kernel==0.8.5 cut-cross-entropy==25.1.1``. Without a GPU Liger's loss runs in Triton's
interpreter, except `softcap` and `ce_weight`. These two options and Liger's layers need a GPU.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import importlib
import inspect
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
TORCH_OPTIONS = "torch.nn.LinearCrossEntropyOptions"
TORCH_MODULE = "torch.nn.LinearCrossEntropyLoss"
LIGER = "liger_kernel.transformers.LigerFusedLinearCrossEntropyLoss"
LIGER_FORWARD = f"{LIGER}.forward"
LIGER_MODELS = "liger_kernel.transformers.apply_liger_kernel_to_*"
CCE = "cut_cross_entropy.linear_cross_entropy"
CCE_MODELS = "cut_cross_entropy.transformers.cce_patch"
TRL = "trl.kernels.chunked_logprob.ChunkedLogProbFunction.forward"

Arguments = dict[str, Any]
needs_gpu = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _torch_backend(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Use PyTorch on a CPU: kernels are slow in the interpreter, and have separate tests."""
    if device.type == "cpu":
        monkeypatch.setenv("FLCE_BACKEND", "torch")


# ------------------------------------------------------------------------------------------------- the tables


@dataclass(frozen=True)
class Row:
    arguments: tuple[str, ...]  # arguments of the original
    ours: str
    in_git: bool  # in the repository of the original, not in its wheel


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def tables() -> dict[str, tuple[str, list[Row]]]:
    """Return for each original the name of its replacement and the rows of its table. Other tables are skipped."""
    found = {}
    for block in re.findall(r"(?:^\|.*\n)+", TEXT, re.M):
        head, _, *lines = map(cells, block.splitlines())
        if re.fullmatch(r"`[a-z_]+\.[\w.*]+`", head[0]):
            rows = [Row(tuple(spans(first)), ours, first.endswith("(git)")) for first, ours, _ in lines]
            found[head[0].strip("`")] = (head[1].strip("`"), rows)
    return found


TABLES = tables()


def original(path: str) -> Any:
    """Return the object at a path, or skip the test if its package is not installed."""
    package = path.split(".")[0]
    if package == "torch":
        if not hasattr(F, "linear_cross_entropy"):
            pytest.skip(f"PyTorch {torch.__version__} has no linear_cross_entropy: it needs 2.13 or newer")
    else:
        # cce_patch needs an old version of Transformers.
        pytest.importorskip(path.rpartition(".")[0] if path == CCE_MODELS else package, exc_type=ImportError)
    return resolve(path)


def resolve(path: str) -> Any:
    """Return the object at a path. Attributes precede modules of the same name, unlike in `pkgutil.resolve_name`."""
    first, *rest = path.split(".")
    found: Any = importlib.import_module(first)
    for number, name in enumerate(rest, 2):
        if not hasattr(found, name):
            importlib.import_module(".".join([first, *rest][:number]))
        found = getattr(found, name)
    return found


def parameters(function: Any) -> set[str]:
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = inspect.signature(function).parameters.values()
    return {p.name for p in found if p.kind not in variable} - {"self", "ctx"}


def parameters_of_original(path: str) -> set[str]:
    if not path.endswith("*"):
        return parameters(original(path))
    module, _, prefix = path.rstrip("*").rpartition(".")
    pytest.importorskip(module.split(".")[0])
    members = importlib.import_module(module)
    names = [name for name in members.__all__ if name.startswith(prefix)]
    assert len(names) > 20, names
    return set().union(*(parameters(getattr(members, name)) for name in names))


def test_the_tables_are_found() -> None:
    torch_tables, liger_tables = [TORCH, TORCH_OPTIONS, TORCH_MODULE], [LIGER, LIGER_FORWARD, LIGER_MODELS]
    assert list(TABLES) == [*torch_tables, *liger_tables, CCE, CCE_MODELS, TRL]


@pytest.mark.parametrize("path", TABLES)
def test_every_argument_has_a_row(path: str) -> None:
    """Check that rows and arguments are equal."""
    _, rows = TABLES[path]
    existing = parameters_of_original(path)
    listed = {name for row in rows for name in row.arguments}
    assert existing <= listed
    assert {name for row in rows if not row.in_git for name in row.arguments} <= existing


@pytest.mark.parametrize("path", TABLES)
def test_replacements_exist(path: str) -> None:
    """Check the second column: arguments of flce, with or without a value, or calls of flce."""
    name, rows = TABLES[path]
    ours = parameters(resolve(name))
    if name == "flce.LinearCrossEntropyLoss":  # passes arguments on
        ours |= parameters(flce.FusedLinearCrossEntropyLoss)
    for row in rows:
        assert spans(row.ours) or row.ours == "none", row
        for span in spans(row.ours):
            call = ast.parse(f"f({span})", mode="eval").body
            assert isinstance(call, ast.Call)
            named = {argument.id for argument in call.args if isinstance(argument, ast.Name)}
            assert named | {keyword.arg for keyword in call.keywords} <= ours, span
            for node in ast.walk(call):
                if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("flce."):
                    resolve(ast.unparse(node))
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "ChunkOptions":
                    assert {keyword.arg for keyword in node.keywords} <= parameters(flce.ChunkOptions), span


# ------------------------------------------------------------------------- each argument, compared to the original

N, H, V = 14, 8, 30
GENERATOR = torch.Generator().manual_seed(3)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


INPUT, WEIGHT, BIAS, CLASS_WEIGHT = randn(N, H), randn(V, H), randn(V), randn(V).abs() + 0.2
TARGET = torch.randint(V, (N,), generator=GENERATOR)
TARGET[[2, 9]] = -100


@dataclass(frozen=True)
class Case:
    """Keyword arguments of the original and of flce, and tensors that differ from the defaults."""

    theirs: Arguments
    ours: Arguments
    target: Tensor = TARGET
    head_bias: Tensor | None = BIAS
    dtype: torch.dtype = torch.float32


def same(**arguments: Any) -> Case:
    return Case(arguments, arguments)


def move(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(device, dtype if value.is_floating_point() else value.dtype)


def outcome(call: Callable[..., Any], case: Case, arguments: Arguments, device: torch.device) -> dict[str, Any]:
    """Run ``call(input, weight, target, bias, **arguments)``. Return its value, the loss and the gradients."""
    x, w, y, b = (move(t, device, case.dtype) for t in (INPUT, WEIGHT, case.target, case.head_bias))
    tensors = {"input": x, "weight": w} | ({} if b is None else {"bias": b})
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
    arguments = {name: move(value, device, case.dtype) for name, value in arguments.items()}
    returned = call(leaves["input"], leaves["weight"], y, leaves.get("bias"), **arguments)
    loss = returned if isinstance(returned, Tensor) else returned.loss
    # Tokens have different upstream gradients: the test then finds gradients that are all scaled by one of them.
    loss.backward(torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype, device=device).view_as(loss))
    return {"loss": loss.detach(), **{name: leaf.grad for name, leaf in leaves.items()}, "returned": returned}


def assert_same(theirs: dict[str, Any], ours: dict[str, Any], tolerance: float = 1e-5) -> None:
    for name, expected in theirs.items():
        if name != "returned":
            assert expected is not None, name
            assert_near(ours[name], expected.double(), tolerance, name)


def fused(x: Tensor, w: Tensor, y: Tensor, b: Tensor | None = None, **arguments: Any) -> Any:
    return flce.fused_linear_cross_entropy(x, w, y, linear_bias=b, **arguments)


@dataclass(frozen=True)
class Library:
    """Loss of another library, its replacement, and the arguments of both."""

    theirs: Callable[..., Any]
    ours: Callable[..., Any]
    cases: dict[str, Case]
    always: tuple[str, ...] = ()
    """Arguments of the original in every case."""
    on_a_gpu: tuple[str, ...] = ()
    """Cases that need a GPU."""
    extra: Arguments = field(default_factory=dict)
    """Further arguments of the original."""


def pytorch(x: Tensor, w: Tensor, y: Tensor, b: Tensor | None, **arguments: Any) -> Any:
    return original(TORCH)(x, w, y, linear_bias=b, **arguments)


def liger(x: Tensor, w: Tensor, y: Tensor, b: Tensor | None, **arguments: Any) -> Any:
    return original(LIGER)(**arguments)(w, x, y, b)


def fused_module(x: Tensor, w: Tensor, y: Tensor, b: Tensor | None, **arguments: Any) -> Any:
    return flce.FusedLinearCrossEntropyLoss(**arguments)(x, w, y, b)


def cce(x: Tensor, w: Tensor, y: Tensor, b: Tensor | None, **arguments: Any) -> Any:
    """Run CCE on sequences: it shifts along the last dimension of the targets."""
    missing = arguments.keys() - parameters(original(CCE))
    if missing:
        assert missing <= {name for row in TABLES[CCE][1] if row.in_git for name in row.arguments}
        pytest.skip(f"the wheel's function has no {', '.join(missing)}")
    return original(CCE)(x.view(2, 7, H), w, y.view(2, 7), **arguments)


def fused_sequences(x: Tensor, w: Tensor, y: Tensor, b: Tensor | None, **arguments: Any) -> Any:
    loss: Any = flce.fused_linear_cross_entropy(x.view(2, 7, H), w, y.view(2, 7), **arguments)
    # CCE does not return the last token of a sequence.
    return loss[:, :-1] if loss.dim() and "shift" in arguments else loss


def no_bias(theirs: Arguments, ours: Arguments, target: Tensor = TARGET) -> Case:
    return Case(theirs, ours, target, head_bias=None)


LIBRARIES = {
    LIGER: Library(
        liger,
        fused_module,
        {
            "defaults": same(),
            "no bias": no_bias({}, {}),
            "ce_weight": Case({"ce_weight": CLASS_WEIGHT}, {"weight": CLASS_WEIGHT}),
            "ignore_index": Case({"ignore_index": 7}, {"ignore_index": 7}, TARGET.clamp(min=7)),
            "lse_square_scale": Case({"lse_square_scale": 0.1}, {"z_loss": 0.1}),
            "label_smoothing": same(label_smoothing=0.2),
            "softcap": same(softcap=2.0),
            "accum_dtype": Case(
                {"accum_dtype": torch.float32}, {"options": flce.ChunkOptions(accum_dtype=torch.float32, chunk_rows=4)}
            ),
            "all": Case(
                {"ce_weight": CLASS_WEIGHT, "lse_square_scale": 0.1, "label_smoothing": 0.2},
                {"weight": CLASS_WEIGHT, "z_loss": 0.1, "label_smoothing": 0.2},
            ),
        },
        # `test_outputs_of_liger` runs the last three.
        (
            "reduction",
            "use_token_scaling",
            "return_z_loss",
            "return_token_accuracy",
            "return_predicted_tokens",
        ),
        on_a_gpu=("softcap", "ce_weight", "all"),  # these use functions that the interpreter does not have
    ),
    CCE: Library(
        cce,
        fused_sequences,
        {
            "defaults": no_bias({}, {}),
            "ignore_index": no_bias({"ignore_index": 7}, {"ignore_index": 7}, TARGET.clamp(min=7)),
            "softcap": no_bias({"softcap": 2.0}, {"softcap": 2.0}),
            "shift": no_bias({"shift": True}, {"shift": 1}),
            "bias": no_bias({"bias": BIAS}, {"linear_bias": BIAS}),
        },
        ("e", "c", "targets", "reduction"),
        extra={"impl": "torch_compile"},
    ),
}


def arguments_of_all() -> list[Any]:
    found = []
    for path, library in LIBRARIES.items():
        for name in library.cases:
            marks = needs_gpu if name in library.on_a_gpu else ()
            found.append(pytest.param(path, name, id=f"{path.rpartition('.')[2]}-{name}", marks=marks))
    return found


@pytest.mark.usefixtures("not_compiled")
@pytest.mark.filterwarnings("ignore:linear_cross_entropy")
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("path, name", arguments_of_all())
def test_an_argument(path: str, name: str, reduction: str, device: torch.device) -> None:
    library = LIBRARIES[path]
    case = library.cases[name]
    theirs = outcome(library.theirs, case, {**case.theirs, "reduction": reduction, **library.extra}, device)
    ours = outcome(library.ours, case, {**case.ours, "reduction": reduction}, device)
    assert ours["loss"].dtype == torch.float32
    assert_same(theirs, ours)


@pytest.mark.parametrize("path", LIBRARIES)
def test_every_argument_is_run(path: str) -> None:
    """Check that every argument of the original's wheel with a counterpart is in a case."""
    library, (_, rows) = LIBRARIES[path], TABLES[path]
    mapped = {name for row in rows if row.ours != "none" and not row.in_git for name in row.arguments}
    assert mapped <= set(library.always) | {name for case in library.cases.values() for name in case.theirs}


def test_module_of_pytorch(device: torch.device) -> None:
    """Compare with every argument that both modules have."""
    arguments: Arguments = {
        "bias": True,
        "device": device,
        "dtype": torch.float64,
        "reduction": "sum",
        "weight": CLASS_WEIGHT.to(device),
        "ignore_index": 3,
        "label_smoothing": 0.1,
    }
    mapped = {name for row in TABLES[TORCH_MODULE][1] if row.ours != "none" for name in row.arguments}
    assert mapped <= {*arguments, "in_features", "num_classes", "options"}
    theirs = original(TORCH_MODULE)(H, V, options=None, **arguments)
    ours = flce.LinearCrossEntropyLoss(H, V, options=flce.ChunkOptions(), **arguments)
    ours.load_state_dict(theirs.state_dict())
    target = TARGET.clamp(min=3).to(device)
    losses = [module(INPUT.to(device), target) for module in (theirs, ours)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(ours.linear.weight.grad, theirs.linear.weight.grad)
    torch.testing.assert_close(ours.linear.bias.grad, theirs.linear.bias.grad)


def test_differences_of_pytorch(device: torch.device) -> None:
    """Check the differences in the rows of the first table."""
    function, options = original(TORCH), original(TORCH_OPTIONS)()
    half, all_ignored = Case({}, {}, dtype=torch.bfloat16), torch.full_like(TARGET, -100)
    assert outcome(pytorch, half, {}, device)["loss"].dtype == torch.bfloat16
    assert outcome(fused, half, {}, device)["loss"].dtype == torch.float32
    empty = Case({}, {}, all_ignored)
    for call, arguments, gradient in [(pytorch, {}, 0.0), (pytorch, {"options": options}, math.nan), (fused, {}, 0.0)]:
        got = outcome(call, empty, arguments, device)
        assert got["loss"].isnan()
        assert bool(got["input"].isnan().all()) == math.isnan(gradient)
    x, w, y = INPUT.to(device), WEIGHT.to(device), TARGET.to(device)
    with pytest.raises(RuntimeError, match="dimensionality"):
        function(x.view(2, 7, H), w, y.view(2, 7))
    with pytest.raises(RuntimeError, match="target dtype"):
        function(x, w, y.int())
    with pytest.warns(UserWarning, match="label_smoothing == 0"):
        function(x, w, y, label_smoothing=0.1, options=options)


# ------------------------------------------------------------------------------------------------------- Liger


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_outputs_of_liger(reduction: str, device: torch.device) -> None:
    flags = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}
    # The model predicts half of the targets.
    best = (INPUT @ WEIGHT.T + BIAS).argmax(-1)
    target = torch.where(torch.arange(N) % 2 == 0, best, TARGET)
    case = Case(
        {"lse_square_scale": 0.1, "reduction": reduction, **flags},
        {"z_loss": 0.1, "reduction": reduction, "stats": ("correct", "argmax", "lse")},
        target,
    )
    theirs, ours = outcome(liger, case, case.theirs, device), outcome(fused_module, case, case.ours, device)
    assert_same(theirs, ours)
    expected, got = theirs["returned"], ours["returned"]
    torch.testing.assert_close(got.z_loss, expected.z_loss)
    assert torch.equal(got.argmax, expected.predicted_tokens)
    accuracy = got.correct.float()
    if reduction != "none":
        accuracy = got.correct.sum() / (target != -100).sum()
        assert 0.4 < accuracy < 0.9
    torch.testing.assert_close(accuracy, expected.token_accuracy)


def test_differences_of_liger(device: torch.device) -> None:
    """Check the differences in the rows of the tables."""
    empty = Case({}, {}, torch.full_like(TARGET, -100))
    theirs, ours = outcome(liger, empty, {}, device), outcome(fused_module, empty, {}, device)
    assert theirs["loss"] == 0.0
    assert ours["loss"].isnan()
    assert not theirs["weight"].any()
    assert not ours["weight"].any()

    x, y = INPUT.to(device, torch.float32), TARGET.to(device)
    for call, has_gradient in [(liger, False), (fused_module, True)]:  # only the head is trained
        w = WEIGHT.to(device, torch.float32).requires_grad_()
        call(x, w, y, None).backward()
        assert (w.grad is not None) == has_gradient

    x, w = x.requires_grad_(), WEIGHT.to(device, torch.float32)
    loss = fused_module(x, w, y, None)
    once = torch.autograd.grad(loss, x, retain_graph=True)[0].clone()
    torch.testing.assert_close(torch.autograd.grad(2 * loss, x)[0], 2.0 * once)
    loss = liger(x, w, y, None)
    for expected in (2.0, 4.0):  # Liger multiplies by the upstream gradient in each backward pass
        (gradient,) = torch.autograd.grad(2 * loss, x, retain_graph=True)
        torch.testing.assert_close(gradient, expected * once)
    with pytest.raises(ValueError, match="too many values"):
        liger(x.view(2, 7, H), w, y.view(2, 7), None)


# ----------------------------------------------------------------------------------------- Cut Cross-Entropy


@pytest.fixture
def not_compiled() -> Iterator[None]:
    """Run `impl="torch_compile"` without compilation, which would take time."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


# --------------------------------------------------------------------------------------------------------- TRL


def test_log_probabilities_of_trl(device: torch.device) -> None:
    """Compare both results, and the gradients of their sum."""
    function = original(TRL.removesuffix(".forward"))
    x, w = (t.detach().to(device, torch.float32).requires_grad_() for t in (INPUT, WEIGHT))
    target = TARGET.to(device).clamp(min=0)
    theirs = function.apply(x, w, None, target, 0.7, 16, 20.0, 0.5, ("entropy",))
    ours: Any = flce.linear_logprobs(x, w, target, temperature=0.7, softcap=20.0, logit_scale=0.5)
    results = []
    for logprob, entropy in (theirs[:2], (ours.logprob, ours.entropy)):
        gradients = torch.autograd.grad((logprob * torch.arange(N, device=device) - entropy).sum(), (x, w))
        names = ("logprob", "entropy", "hidden", "W")
        results.append(dict(zip(names, (logprob.detach(), entropy.detach(), *gradients), strict=True)))
    assert_same(results[0], results[1])


# ------------------------------------------------------------------------------------------ before and after

BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)
# Layers of these functions do not run in the interpreter.
LAYERS = ("apply_liger_kernel_to_llama", "use_liger_kernel")


def test_blocks_are_pairs() -> None:
    titles = [block.splitlines()[0] for block in BLOCKS]
    assert titles == ["# before", "# after"] * 6


@pytest.mark.usefixtures("not_compiled", "restored_modules")
@pytest.mark.parametrize(
    "block",
    [pytest.param(block, marks=needs_gpu if any(name in block for name in LAYERS) else ()) for block in BLOCKS],
    ids=range(len(BLOCKS)),
)
def test_a_block(block: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the `loss` of a block, and its gradients, with stock operators or a stock model."""
    for package in re.findall(r"^from (cut_cross_entropy[.\w]*) |(liger_kernel)", block, re.M):
        pytest.importorskip("".join(package), exc_type=ImportError)
    if "LinearCrossEntropyOptions" in block and not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        pytest.skip(f"PyTorch {torch.__version__} has no LinearCrossEntropyOptions")
    if "linear_cross_entropy" in block and "cut_cross_entropy" in block and device.type == "cpu":
        function = original(CCE)
        monkeypatch.setattr("cut_cross_entropy.linear_cross_entropy", functools.partial(function, impl="torch_compile"))
    run = functools.partial(exec, compile(block, "block", "exec"))
    if "model" in block:
        check_model(run, tmp_path, device, trains="Trainer" in block)
    else:
        check_operators(run, device, "cut_cross_entropy" in block, "token_scaling" in block or "logprob" in block)


def check_operators(run: Callable[[Arguments], Any], device: torch.device, cce: bool, token_scaling: bool) -> None:
    def stock(names: Arguments) -> None:
        logits = F.linear(names["hidden"][:, :-1], names["W"]).flatten(0, 1).float()
        targets = names["targets"][:, 1:].flatten()
        losses = F.cross_entropy(logits, targets, reduction="none")
        scale = losses.detach().neg().exp() if token_scaling else 1.0
        names["loss"] = (scale * losses).sum() / (targets != -100).sum()

    # CCE's kernels support only half precision.
    dtype, tolerance = (torch.bfloat16, 2e-2) if cce and device.type == "cuda" else (torch.float32, 1e-5)
    results = []
    for each in (stock, run):
        hidden = INPUT.to(device, dtype, copy=True).view(2, 7, H).requires_grad_()
        weight = WEIGHT.to(device, dtype, copy=True).requires_grad_()
        names: Arguments = {
            "torch": torch,
            "flce": flce,
            "hidden": hidden,
            "W": weight,
            "targets": TARGET.to(device).view(2, 7),
        }
        each(names)
        names["loss"].backward()
        results.append({"loss": names["loss"].detach(), "hidden": hidden.grad, "W": weight.grad})
    assert_same(results[0], results[1], tolerance)


def check_model(run: Callable[[Arguments], Any], folder: Path, device: torch.device, trains: bool) -> None:
    transformers = pytest.importorskip("transformers")

    def stock(names: Arguments) -> None:
        if trains:
            trainer = transformers.Trainer(
                names["model"], transformers.TrainingArguments(folder), train_dataset=names["data"]
            )
            names["loss"] = trainer.train().training_loss
        else:
            names["loss"] = names["model"](names["input_ids"], labels=names["labels"]).loss

    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(config).train()
    model.save_pretrained(folder / "model")
    ids = torch.randint(64, (4, 9), generator=torch.Generator().manual_seed(6)).to(device)
    results = []
    for each in (stock, run):
        names = {
            "flce": flce,
            "folder": folder,
            "path": folder / "model",
            "model": copy.deepcopy(model).to(device),
            "stock": copy.deepcopy(model).to(device),
            "input_ids": ids,
            "labels": ids,
            "data": [{"input_ids": row, "labels": row} for row in ids.tolist()],
        }
        with contextlib.nullcontext() if trains else device:  # `from_pretrained` loads a model on this device
            each(names)
        if trains:
            results.append({"loss": torch.tensor(names["loss"])})
        else:
            names["loss"].backward()
            gradients = {name: p.grad for name, p in names["model"].named_parameters()}
            results.append({"loss": names["loss"].detach(), **gradients})
    assert_same(results[0], results[1], 1e-4)


@pytest.fixture
def restored_modules() -> Iterator[None]:
    """Restore the modules of Transformers that Liger's functions change permanently."""
    modules: list[Any] = []
    with contextlib.suppress(ImportError):
        from transformers.models.llama import modeling_llama

        modules = [modeling_llama, modeling_llama.LlamaForCausalLM, F]
    before = [dict(vars(module)) for module in modules]
    yield
    for module, members in zip(modules, before, strict=True):
        for name, value in members.items():
            if vars(module)[name] is not value:
                setattr(module, name, value)


@pytest.mark.usefixtures("restored_modules")
def test_the_loss_alone_of_a_model_that_liger_patches(device: torch.device, tmp_path: Path) -> None:
    """Check only Liger's loss of a model, which runs in the interpreter. Its layers do not."""
    pytest.importorskip("liger_kernel")

    def run(names: Arguments) -> None:
        apply: Any = resolve("liger_kernel.transformers.apply_liger_kernel_to_llama")
        apply(model=names["model"], rope=False, rms_norm=False, swiglu=False)
        outputs = names["model"](names["input_ids"], labels=names["labels"], return_token_accuracy=True)
        assert outputs.logits is None
        patched = flce.patch_model(copy.deepcopy(names["stock"]), on_materialize="raise")
        logits = patched(names["input_ids"], labels=names["labels"]).logits
        accuracy = (logits[:, :-1].argmax(-1) == names["labels"][:, 1:]).float().mean()
        torch.testing.assert_close(accuracy, outputs.token_accuracy)
        names["loss"] = outputs.loss

    check_model(run, tmp_path, device, trains=False)
