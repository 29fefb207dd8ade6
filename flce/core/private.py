"""Private names of other libraries that flce uses: one table, `NAMES`, from which the other modules read them.

``private.len_torch_dispatch_stack`` is looked up at its first use, never at import, and stored as an attribute of this
module. If a version of a library does not have the name, the fallback is stored instead, and a warning states the
effect. Other names that flce uses are documented, or are fields of existing objects: `tests/core/test_private_names.py`
lists them.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple


class Name(NamedTuple):
    """One or more private names that are used together."""

    paths: str
    """The names, separated by spaces. All of them are needed."""
    effect: str
    """The effect of a missing name, for the warning."""
    fallback: Any
    """The value if a name is missing."""
    build: Callable[..., Any] | None = None
    """Function that returns the value from the objects with these names; None: the first object is the value."""
    required_module: str | None = None
    """Until this module is imported, the value is the fallback, without a warning."""


def _skip_frames(action: Any, strategy: Any, set_strategy: Any) -> Callable[[Any, bool], None]:
    """Return a function ``(code, deep)``: no graph begins in a frame of this code, nor, with `deep`, in its callees."""

    def skip(code: Any, deep: bool) -> None:
        set_strategy(code, strategy(action.SKIP, action.SKIP if deep else action.DEFAULT))

    return skip


def _torch() -> Any:
    return sys.modules["torch"]  # not an import: this module is imported before PyTorch is needed


def _has_name(node: Any, function: Any) -> bool:
    return type(node).__name__ == f"{function.__name__}Backward"


def _required(path: str, feature: str) -> Name:
    """Return the entry of a name without which `feature` is impossible."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{feature} needs {path}, which this version of PyTorch does not have")

    return Name(path, f"{feature} raises RuntimeError", refuse)


def _hook(path: str, wrapper: str, module: str) -> Name:
    """Return the entry of a hook or function that a wrapper of models registers on the logits."""
    return Name(path, f"training under {wrapper} computes the logits", None, None, module)


def _nothing(*args: Any) -> None:
    return None


def _join(package: str, *names: str) -> str:
    return " ".join(f"{package}.{name}" for name in names)


_C, _MODES, _INACTIVE = "torch._C", "torch.utils._python_dispatch", SimpleNamespace(_current_level=0)
_FSDP, _DDP = "torch.distributed.fsdp", "torch.nn.parallel.distributed"
_FSDP1, _FSDP2 = f"{_FSDP}._runtime_utils", f"{_FSDP}._fully_shard"
_SKIP = _join(f"{_C}._dynamo.eval_frame", "_FrameAction", "_FrameExecStrategy", "set_code_exec_strategy")
_TRANSLATOR = "torch._dynamo.symbolic_convert.InstructionTranslator.current_tx"
_DRIVER = _join("triton", "compiler.CompiledKernel.__getitem__", "runtime.driver")
_DEEPSPEED = "deepspeed.runtime.utils.OutputBackwardHookManager._make_backward_hook"
_SLOW, _MEMORY, _STOCK = "calls are slower", "gradients need more memory", "patched models run stock code"
_AD, _COMPILED = "torch.autograd.forward_ad", "torch.nn.Module._compiled_call_impl"
_CLEAR = "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack"
_VERSION = "torch.autograd.grad_mode._unsafe_preserve_version_counter"
_PLAIN = "compiled patched models have more graphs, and return plain objects as logits"

NAMES: dict[str, Name] = {
    # -------------------------------------------------------------------------------------------------- the losses
    "len_torch_dispatch_stack": Name(f"{_C}._len_torch_dispatch_stack", _SLOW, lambda: 1),
    "dispatch_modes": Name(f"{_MODES}._get_current_dispatch_mode_stack", "late flop counters miss calls", list),
    "peek_interpreter_stack": Name(f"{_C}._functorch.peek_interpreter_stack", f"{_STOCK}; {_SLOW}", lambda: "unknown"),
    "get_tracing_state": Name(f"{_C}._get_tracing_state", _SLOW, lambda: _torch().jit.is_tracing() or None),
    "is_graph_retained": Name(f"{_C}._autograd._get_current_graph_task_keep_graph", _MEMORY, lambda: True),
    "will_execute": Name(f"{_C}._will_engine_execute_node", _MEMORY, lambda node: False),
    "is_batchedtensor": Name(f"{_C}._functorch.is_batchedtensor", "some errors are unclear", lambda x: False),
    "is_gradtrackingtensor": Name(f"{_C}._functorch.is_gradtrackingtensor", "some errors are unclear", lambda x: False),
    "forward_ad": Name(f"{_AD}._current_level", _STOCK, _INACTIVE, lambda level: sys.modules[_AD]),
    "disable_current_modes": Name(
        f"{_MODES}._disable_current_modes", "modes see tensors of plans", contextlib.nullcontext
    ),
    "disable_torch_function": Name(
        f"{_C}.DisableTorchFunction", "modes see flce's operations", lambda: _torch()._C.DisableTorchFunctionSubclass()
    ),
    "resolve_process_group": _required("torch.distributed.distributed_c10d._resolve_process_group", "a divided head"),
    "triton_driver": Name(_DRIVER, "each launch takes 0.1 ms more", None, lambda launch, driver: driver),
    # ----------------------------------------------------------------------------------------------- patched models
    "make_wrapper_subclass": Name("torch.Tensor._make_wrapper_subclass", "patch_model leaves models unchanged", None),
    "set_throw_on_mutable_data_ptr": Name(f"{_C}._set_throw_on_mutable_data_ptr", "data_ptr() is 0", _nothing),
    "clear_interpreter_stack": _required(_CLEAR, "reading lazy logits in torch.func"),
    "preserve_version": Name(_VERSION, "an autograd.Function that saves lazy logits fails", contextlib.nullcontext),
    "is_node_of": Name(
        "torch.autograd.Function._backward_cls",
        "Functions of one name are equal",
        _has_name,
        lambda kind: lambda node, function: isinstance(node, function._backward_cls),
    ),
    "saved_tensors_hooks": Name(f"{_C}._autograd._top_saved_tensors_default_hooks", "some checkpoints fail", _nothing),
    # ------------------------------------------------------------------------------- patched models, torch.compile
    "skip_frames": Name(_SKIP, _PLAIN, _nothing, _skip_frames),
    "current_translator": Name(_TRANSLATOR, _PLAIN, _nothing),
    "is_exporting": Name(
        "torch.compiler._is_exporting_flag",
        _STOCK,
        lambda: _torch().compiler.is_exporting(),
        lambda flag: lambda: _torch().compiler._is_exporting_flag,
    ),
    "compiled_call": Name(_COMPILED, "layers are compiled twice", _nothing, lambda _: lambda m: m._compiled_call_impl),
    # ------------------------------------------------------------------------------- patched models, several GPUs
    "FSDPState": _hook(f"{_FSDP2}._fsdp_state.FSDPState", "FSDP2", _FSDP),
    "fsdp_state_of": Name(f"{_FSDP2}.FSDPModule._get_fsdp_state", "late reads of logits fail", _nothing, None, _FSDP),
    "fsdp1_hook": _hook(f"{_FSDP1}._pre_backward_hook", "FSDP1", _FSDP),
    "DDPSink": _hook(f"{_DDP}._DDPSink", "DDP(static_graph=True)", _DDP),
    "fabric_hook": _hook("lightning.fabric.wrappers._backward_hook", "Lightning Fabric", "lightning.fabric.wrappers"),
    "standalone_fabric_hook": _hook("lightning_fabric.wrappers._backward_hook", "Fabric", "lightning_fabric.wrappers"),
    "deepspeed_hook": _hook(_DEEPSPEED, "DeepSpeed", "deepspeed.runtime.utils"),
    "current_graph_task_id": Name(f"{_C}._current_graph_task_id", "two losses of an output fail in ZeRO-3", lambda: -1),
}


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    entry = NAMES[name]
    if entry.required_module is not None and entry.required_module not in sys.modules:
        return entry.fallback
    absent = missing_paths(entry)
    if absent:
        from flce.core.log import find_caller

        find_caller().warn(describe_missing(entry, absent), RuntimeWarning)
        value = entry.fallback
    else:
        found = [resolve_path(path) for path in entry.paths.split()]
        value = found[0] if entry.build is None else entry.build(*found)
    globals()[name] = value  # so that the next look-up does not call this function
    return value


def incomplete_entries() -> list[tuple[Name, list[str]]]:
    """Return the entries with missing names, and these names. Entries whose module is not imported are left out."""
    return [
        (entry, paths)
        for entry in NAMES.values()
        if entry.required_module in (None, *sys.modules) and (paths := missing_paths(entry))
    ]


def missing_paths(entry: Name) -> list[str]:
    absent = []
    for path in entry.paths.split():
        try:
            resolve_path(path)
        except (AttributeError, ImportError):
            absent.append(path)
    return absent


def resolve_path(path: str) -> Any:
    """Return the object with a dotted name. Raise AttributeError or ImportError if there is none."""
    package, *parts = path.split(".")
    place, value = package, importlib.import_module(package)
    for part in parts:
        place = f"{place}.{part}"
        # A submodule becomes an attribute of its package only when it is imported.
        value = getattr(value, part) if hasattr(value, part) else importlib.import_module(place)
    return value


def describe_missing(entry: Name, absent: list[str]) -> str:
    """Return the warning: the missing names and the effect."""
    package = absent[0].partition(".")[0]
    version = getattr(sys.modules.get(package), "__version__", "")
    return (
        f"{package} {version} has no {', '.join(absent)}: {entry.effect}. A newer version of flce may know how this "
        f"{package} does it."
    )
