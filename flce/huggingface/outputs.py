"""What a patched model returns: where lazy logits leave a graph of ``torch.compile``, and where they are left out.

No graph can make a tensor of ours, so within a graph lazy logits are plain objects
(:class:`~flce.huggingface.lazy.TracedLazyLogits`). Callers of a model expect tensors. So the
outermost frame of a patched model is left to Python, which changes what comes out of the graph below it.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

from torch import Tensor, nn

from flce.core.callers import caller
from flce.huggingface.head_call import HeadCall
from flce.huggingface.lazy import TracedLazyLogits, is_lazy, make_lazy
from flce.huggingface.lazy.terms import Term
from flce.huggingface.usage import Usage


def as_tensors(outputs: Any, usage: Usage, owner: nn.Module, passed_by: bool) -> Any:
    """The outputs of a model with plain lazy logits replaced by tensors.

    Args:
        outputs: what the model returned; a mapping is changed in place.
        usage: where to count what becomes of the logits.
        owner: the model.
        passed_by: the graph has computed a loss, whose gradient does not pass through the logits.
    """

    def call_of(term: Term) -> HeadCall:
        assert term.weight is not None
        layer = next((m for m in owner.modules() if m._parameters.get("weight") is term.weight), None)
        call = HeadCall(term.weight, term.bias, usage, layer, owner)
        call.passed_by = passed_by
        return call

    return _replaced(outputs, call_of)


def _replaced(value: Any, call_of: Callable[[Term], HeadCall]) -> Any:
    if isinstance(value, TracedLazyLogits):
        real: Tensor | None = value._existing()
        return make_lazy(_watched(value._state, call_of)) if real is None else real
    if isinstance(value, MutableMapping):
        for key, item in list(value.items()):
            if not (item is None or isinstance(item, Tensor)):
                new = _replaced(item, call_of)
                if new is not item:
                    value[key] = new
    elif type(value) in (tuple, list):
        return type(value)(item if isinstance(item, Tensor) else _replaced(item, call_of) for item in value)
    return value


def _watched(state: Any, call_of: Callable[[Term], HeadCall]) -> Any:
    """From now on changes of what the logits are made from are noticed, and hooks of wrappers are called."""
    return state.recorded(tuple(call_of(term) for term in state.terms if term.weight is not None))


def without_logits(outputs: Any) -> Any:
    """The outputs of a replica of ``nn.DataParallel``, which would gather all logits on one GPU."""
    named = isinstance(outputs, dict)
    values = outputs.values() if named else outputs if type(outputs) in (tuple, list) else ()
    if not any(map(is_lazy, values)):
        return outputs
    caller().warn(
        "nn.DataParallel would gather the logits of all GPUs on one, so a model patched by flce leaves them out of "
        "what it returns in training with labels. Use torchrun or accelerate launch to train on several GPUs",
        UserWarning,
    )
    if named:
        return type(outputs)(**{name: value for name, value in outputs.items() if not is_lazy(value)})
    return type(outputs)(None if is_lazy(value) else value for value in outputs)
