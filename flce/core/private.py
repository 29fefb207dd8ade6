"""Private names of other libraries that flce uses: one table, `NAMES`, from which the other modules read them.

``private.len_torch_dispatch_stack`` is looked up at its first use, never at import, and stored as an attribute of this
module. If a version of a library does not have the name, the fallback is stored instead, and a warning states the
consequence. Without this table flce uses only names that PyTorch documents or that are fields of existing objects;
`DOCUMENTED` lists them.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class PrivateName:
    """Use of one or more private names.

    Attributes:
        paths: the names. All of them are needed.
        purpose: the purpose, as the words after "for" in the warning.
        consequence: a sentence on the effect if a name is missing.
        fallback: value for the code if a name is missing.
        build: function that returns the value for the code from the objects with these names; None: the first object is
            the value.
        required_module: a module. Until it is imported, the code gets the fallback without a warning.
    """

    paths: tuple[str, ...]
    purpose: str
    consequence: str
    fallback: Any
    build: Callable[..., Any] | None = None
    required_module: str | None = None


def _unavailable(purpose: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"this version of PyTorch lacks a private name that flce needs for {purpose}")

    return refuse


def _skip_frames(action: Any, strategy: Any, set_strategy: Any) -> Callable[[Any, bool], None]:
    """Return a function ``(code, deep)``: no graph begins in a frame of this code, nor, with `deep`, in its callees."""

    def skip(code: Any, deep: bool) -> None:
        set_strategy(code, strategy(action.SKIP, action.SKIP if deep else action.DEFAULT))

    return skip


def _is_tracing() -> bool | None:
    import torch

    return torch.jit.is_tracing() or None  # type: ignore[attr-defined]


def _is_exporting() -> bool:
    import torch

    return bool(torch.compiler._is_exporting_flag)


def _public_is_exporting() -> bool:
    import torch

    return torch.compiler.is_exporting()


def _reduction(size_average: bool | None, reduce: bool | None) -> str:
    return "none" if reduce is False else "sum" if size_average is False else "mean"


def _without_torch_function() -> Any:
    import torch

    return torch._C.DisableTorchFunctionSubclass()


def _fsdp1_unsharded(unshard: Any, reshard: Any, states: Any) -> Any:
    import torch

    @contextlib.contextmanager
    def unsharded(unit: Any) -> Iterator[None]:
        handle = unit._handle

        @contextlib.contextmanager
        def as_in_forward() -> Iterator[None]:  # FSDP1's prefetch does the same
            before, handle._training_state = handle._training_state, states.FORWARD
            try:
                yield
            finally:
                handle._training_state = before

        with as_in_forward():
            unshard(unit, handle, unit._unshard_stream, unit._pre_unshard_stream)
            unit._device_handle.current_stream().wait_stream(unit._unshard_stream)
        try:
            yield
        finally:
            with as_in_forward(), torch.no_grad():  # with gradients, views of the freed weight may stay alive
                reshard(unit, handle, True)

    return unsharded


def _required(path: str, purpose: str) -> PrivateName:
    """Return the entry of a name without which `purpose` is impossible."""
    return PrivateName((path,), purpose, "That raises RuntimeError.", _unavailable(purpose))


def _hook_on_logits(path: str, purpose: str, module: str, wrapper: str = "this wrapper") -> PrivateName:
    """Return the entry of a hook or function that a wrapper of models registers on the logits."""
    return PrivateName((path,), purpose, f"Training under {wrapper} computes the logits.", None, None, module)


_FSDP1, _FSDP2 = "torch.distributed.fsdp._runtime_utils", "torch.distributed.fsdp._fully_shard"
_SLOWER = "Calls go through the custom operators, which takes longer."

NAMES: dict[str, PrivateName] = {
    # -------------------------------------------------------------------------------------------------- the losses
    "len_torch_dispatch_stack": PrivateName(
        ("torch._C._len_torch_dispatch_stack",), "detecting whether a mode sees a call", _SLOWER, lambda: 1
    ),
    "dispatch_modes": PrivateName(
        ("torch.utils._python_dispatch._get_current_dispatch_mode_stack",),
        "flop counters, and checkpoints that keep some results",
        "A flop counter that is imported after flce does not count its calls.",
        list,
    ),
    "peek_interpreter_stack": PrivateName(
        ("torch._C._functorch.peek_interpreter_stack",),
        "detecting whether a transform of torch.func is active",
        "flce assumes that one is active: patched models run stock code. " + _SLOWER,
        lambda: "unknown",
    ),
    "get_tracing_state": PrivateName(
        ("torch._C._get_tracing_state",),
        "detecting whether torch.jit.trace is active",
        "flce calls torch.jit.is_tracing(), which takes longer.",
        _is_tracing,
    ),
    "is_graph_retained": PrivateName(
        ("torch._C._autograd._get_current_graph_task_keep_graph",),
        "detecting whether a backward has retain_graph=True",
        "flce assumes that each backward has it: gradients are not scaled in place, which needs more memory.",
        lambda: True,
    ),
    "is_batchedtensor": PrivateName(
        ("torch._C._functorch.is_batchedtensor",),
        "a backward under torch.vmap",
        "Gradients are not scaled in place, which needs more memory. " + _SLOWER,
        lambda x: True,
    ),
    "is_gradtrackingtensor": PrivateName(
        ("torch._C._functorch.is_gradtrackingtensor",),
        "the error for torch.func.grad",
        "PyTorch raises a less specific error.",
        lambda x: False,
    ),
    "is_legacy_batchedtensor": PrivateName(
        ("torch._C._functorch.is_legacy_batchedtensor",),
        "torch.autograd.grad(is_grads_batched=True)",
        "This call raises an error of PyTorch.",
        lambda x: False,
    ),
    "remove_batch_dim": _required("torch._remove_batch_dim", "torch.autograd.grad(is_grads_batched=True)"),
    "add_batch_dim": _required("torch._add_batch_dim", "torch.autograd.grad(is_grads_batched=True)"),
    "forward_ad": PrivateName(
        ("torch.autograd.forward_ad._current_level",),
        "detecting whether forward-mode differentiation is active",
        "flce assumes that it is active: patched models run stock code.",
        SimpleNamespace(_current_level=0),
        build=lambda level: sys.modules["torch.autograd.forward_ad"],
    ),
    "disable_current_modes": PrivateName(
        ("torch.utils._python_dispatch._disable_current_modes",),
        "planning that is invisible to modes",
        "A mode such as a flop counter sees the meta tensors of planning.",
        contextlib.nullcontext,
    ),
    "disable_torch_function": PrivateName(
        ("torch._C.DisableTorchFunction",),
        "work that no mode of torch functions sees",
        "Such a mode sees flce's own operations.",
        _without_torch_function,
    ),
    "resolve_process_group": PrivateName(
        ("torch.distributed.distributed_c10d._resolve_process_group",),
        "flce.cross_entropy of a vocabulary that is split over processes",
        "That raises RuntimeError.",
        _unavailable("flce.cross_entropy(process_group=...)"),
    ),
    "triton_driver": PrivateName(
        ("triton.compiler.CompiledKernel.__getitem__", "triton.runtime.driver"),
        "prepared launches of kernels",
        "Each launch is prepared again in every call, in 0.1 ms.",
        None,
        build=lambda launch, driver: driver,
    ),
    # ----------------------------------------------------------------------------------------------- profile_memory
    "profiler_enabled": PrivateName(
        ("torch.autograd._profiler_enabled",),
        "flce.profile_memory to see another profiler",
        "Two profilers at once are not refused.",
        None,
    ),
    "cuda_history_enabled": PrivateName(
        ("torch._C._cuda_isHistoryEnabled",),
        "detecting another record of CUDA memory in flce.profile_memory",
        "flce.profile_memory ends that record.",
        lambda: False,
    ),
    "record_memory_history": _required(
        "torch.cuda.memory._record_memory_history", "flce.profile_memory on a CUDA device"
    ),
    "memory_snapshot": _required("torch.cuda.memory._snapshot", "flce.profile_memory on a CUDA device"),
    # ----------------------------------------------------------------------------------------------- patched models
    "make_wrapper_subclass": PrivateName(
        ("torch.Tensor._make_wrapper_subclass",),
        "lazy logits",
        "flce.patch_model leaves models as they are.",
        None,
    ),
    "set_throw_on_mutable_data_ptr": PrivateName(
        ("torch._C._set_throw_on_mutable_data_ptr",),
        "an error for code that reads the address of lazy logits before they are computed",
        "Such code gets a null pointer.",
        lambda tensor: None,
    ),
    "clear_interpreter_stack": PrivateName(
        ("torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack",),
        "logits that a transform of torch.func reads",
        "That raises RuntimeError: call logits.materialize() before the transform.",
        _unavailable("logits that a transform of torch.func reads: call logits.materialize() before it"),
    ),
    "preserve_version": PrivateName(
        ("torch.autograd.grad_mode._unsafe_preserve_version_counter",),
        "logits that an autograd.Function saves before they are computed",
        "The backward of the Function raises an error about an inplace operation.",
        lambda tensor: contextlib.nullcontext(),
    ),
    "is_node_of": PrivateName(
        ("torch.autograd.Function._backward_cls",),
        "identifying the autograd.Function that computed a tensor",
        "Functions with the same name are treated as the same.",
        lambda node, function: type(node).__name__ == f"{function.__name__}Backward",
        build=lambda kind: lambda node, function: isinstance(node, function._backward_cls),
    ),
    "saved_tensors_hooks": PrivateName(
        ("torch._C._autograd._top_saved_tensors_default_hooks",),
        "torch.utils.checkpoint(use_reentrant=False) around a model",
        "A checkpointed evaluation with labels, and logits that are read within another checkpoint, raise an error.",
        lambda ignore_traced: None,
    ),
    "legacy_reduction": PrivateName(
        ("torch.nn._reduction.legacy_get_string",),
        "size_average and reduce of a loss",
        "flce applies them without PyTorch's warning.",
        _reduction,
    ),
    # ------------------------------------------------------------------------------- patched models, torch.compile
    "skip_frames": PrivateName(
        (
            "torch._C._dynamo.eval_frame._FrameAction",
            "torch._C._dynamo.eval_frame._FrameExecStrategy",
            "torch._C._dynamo.eval_frame.set_code_exec_strategy",
        ),
        "frames that torch.compile leaves to Python",
        "In a compiled patched model logits may be plain objects instead of tensors, and there are more graphs.",
        lambda code, deep: None,
        build=_skip_frames,
    ),
    "current_translator": PrivateName(
        ("torch._dynamo.symbolic_convert.InstructionTranslator.current_tx",),
        "ending a graph of torch.compile at the end of a patched model",
        "Logits of a patched model in a compiled function are plain objects instead of tensors.",
        lambda: None,
    ),
    "is_exporting": PrivateName(
        ("torch.compiler._is_exporting_flag",),
        "torch.export of a patched model",
        "flce calls torch.compiler.is_exporting(). Before PyTorch 2.12 compiled models then run stock code.",
        _public_is_exporting,
        build=lambda flag: _is_exporting,
    ),
    "compiled_call": PrivateName(
        ("torch.nn.Module._compiled_call_impl",),
        "layers that are compiled one by one",
        "These layers are compiled twice.",
        lambda module: None,
        build=lambda method: attrgetter("_compiled_call_impl"),
    ),
    # ------------------------------------------------------------------------------- patched models, several GPUs
    "FSDPState": _hook_on_logits(
        f"{_FSDP2}._fsdp_state.FSDPState", "FSDP2's hooks on the logits", "torch.distributed.fsdp", "FSDP2"
    ),
    "fsdp_state_of": PrivateName(
        (f"{_FSDP2}.FSDPModule._get_fsdp_state",),
        "FSDP2's units around a model",
        "If only a part of the model is patched, logits that are read after their weight is freed raise an error.",
        lambda unit: None,
        required_module="torch.distributed.fsdp",
    ),
    "fsdp1_hook": _hook_on_logits(
        f"{_FSDP1}._pre_backward_hook", "FSDP1's hooks on the logits", "torch.distributed.fsdp", "FSDP1"
    ),
    "fsdp1_unsharded": PrivateName(
        (f"{_FSDP1}._unshard", f"{_FSDP1}._reshard", "torch.distributed.fsdp._common_utils.HandleTrainingState"),
        "the weight of a head that is a separate FSDP1 unit",
        "Such a head runs stock code.",
        None,
        build=_fsdp1_unsharded,
        required_module="torch.distributed.fsdp",
    ),
    "DDPSink": _hook_on_logits(
        "torch.nn.parallel.distributed._DDPSink",
        "the autograd.Function that DDP(static_graph=True) applies to the logits",
        "torch.nn.parallel.distributed",
    ),
    "fabric_hook": _hook_on_logits(
        "lightning.fabric.wrappers._backward_hook",
        "Lightning Fabric's hooks on the logits",
        "lightning.fabric.wrappers",
    ),
    "standalone_fabric_hook": _hook_on_logits(
        "lightning_fabric.wrappers._backward_hook",
        "the hooks on the logits of Lightning Fabric as a separate package",
        "lightning_fabric.wrappers",
    ),
    "deepspeed_hook": _hook_on_logits(
        "deepspeed.runtime.utils.OutputBackwardHookManager._make_backward_hook",
        "DeepSpeed's hooks on the logits",
        "deepspeed.runtime.utils",
        "DeepSpeed",
    ),
    "current_graph_task_id": PrivateName(
        ("torch._C._current_graph_task_id",),
        "several losses of one output under DeepSpeed ZeRO-3",
        "Two forwards before one backward, with two losses for each, raise an error there.",
        lambda: -1,
    ),
    # ----------------------------------------------------------------------------------------------------- benchmarks
    "cuda_sleep": PrivateName(
        ("torch.cuda._sleep",),
        "benchmarks of the repository, which time kernels without the host",
        "Times of small calls include the host's time.",
        lambda cycles: None,
    ),
}

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
    "_state_ctx": "of FSDP2's state; may be missing",
    "ds_id": "of DeepSpeed's parameters: Transformers and PEFT read it, too",
    "ds_status": "the same",
    "pre_bwd_fn": "of a module under DeepSpeed ZeRO-3: function applied to the outputs; may be missing",
    "post_bwd_fn": "of a module under DeepSpeed ZeRO-3: function applied to the inputs; may be missing",
    "_is_replica": "of modules that nn.DataParallel copied; may be missing",
    "_old_forward": "of modules that Accelerate changed; may be missing",
    "_grouped_mm": "an operator of newer versions; may be missing",
    "_getframe": "Python's own",
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
"""Private names, or fields, that are used without a fallback, and the reason."""


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    entry = NAMES[name]
    if entry.required_module is not None and entry.required_module not in sys.modules:
        return entry.fallback
    absent = missing_paths(entry)
    if absent:
        from flce.core.callers import find_caller

        find_caller().warn(describe_missing(entry, absent), RuntimeWarning)
        value = entry.fallback
    else:
        found = [resolve_path(path) for path in entry.paths]
        value = found[0] if entry.build is None else entry.build(*found)
    globals()[name] = value  # so that the next look-up does not call this function
    return value


def incomplete_entries() -> list[tuple[PrivateName, list[str]]]:
    """Return the entries with missing names, and these names. Entries whose module is not imported are left out."""
    return [(entry, paths) for entry in NAMES.values() if _is_here(entry) and (paths := missing_paths(entry))]


def _is_here(entry: PrivateName) -> bool:
    import torch

    needs_cuda = any(path.startswith("torch._C._cuda") for path in entry.paths)  # missing in builds for CPUs
    return (entry.required_module is None or entry.required_module in sys.modules) and not (
        needs_cuda and torch.version.cuda is None
    )


def missing_paths(entry: PrivateName) -> list[str]:
    absent = []
    for path in entry.paths:
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


def describe_missing(entry: PrivateName, absent: list[str]) -> str:
    """Return the warning: the missing names and the consequence."""
    package = absent[0].partition(".")[0]
    version = getattr(sys.modules.get(package), "__version__", "")
    return (
        f"{package} {version} has no {', '.join(absent)}, which flce uses for {entry.purpose}. "
        f"{entry.consequence} A newer version of flce may know how this {package} does it."
    )
