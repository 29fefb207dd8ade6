"""Lazy logits: objects that record the inputs of a head and the operations on its logits. ``patch.py`` creates them.

A patched head returns lazy logits instead of ``hidden @ weight.T + bias``. Operations of model code between the head
and the loss (casts, scalar factors, tanh, reshapes, slices) return lazy logits too. At
``torch.nn.functional.cross_entropy`` the fused loss is computed. All other operations compute the real logits, once and
with a warning.

Two classes wrap the same state, because one kind of object does not work both in eager mode and in the compiler:

* `tensor.LazyLogits`, in eager mode, is a tensor without storage (a wrapper subclass). So
  ``isinstance(x, torch.Tensor)`` is True for trainers and ``ModelOutput``. C++ code that does not call
  ``__torch_function__`` (``autograd.Function.apply``, DDP, collectives) would crash with an object that is a tensor
  only by its ``__class__``. A wrapper subclass has a ``grad_fn`` that leads to the hidden states and the head, and a
  ``__torch_dispatch__``, so this code gets right values and right gradients too.
* `tensor.TracedLazyLogits`, under ``torch.compile``, is a plain Python object with ``__torch_function__``. The compiler
  cannot create a wrapper subclass within a graph, but it can trace plain objects with ``fullgraph=True``.

Each module imports only modules above it:

| module | contents |
|---|---|
| `normal_form` | recorded operations and their normal form |
| `state` | the record of lazy logits, a sum of terms; real logits, the fused loss and values computed from it |
| `divergences`, `elementwise`, `values`, `indexing` | one function for each operation on a state |
| `tables` | the functions of PyTorch, each with its operation |
| `base` | the base of both classes: views, copies, and the real logits |
| `dispatch` | the call of a function of PyTorch with lazy logits |
| `tensor` | the two classes |
"""

from flce.huggingface.lazy.base import is_lazy, make_lazy, register_results, state_of
from flce.huggingface.lazy.tensor import LazyLogits, TracedLazyLogits

__all__ = ["LazyLogits", "TracedLazyLogits", "is_lazy", "make_lazy", "register_results", "state_of"]
