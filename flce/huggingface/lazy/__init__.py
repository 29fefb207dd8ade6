"""Logits that have not been computed: the head's inputs, and what has been done to the logits since.

Lazy logits stand where ``hidden @ weight.T + bias`` would. They go through what model code does between the head and
the loss (casts, scalar factors, tanh, reshapes, slices), become the fused loss at
``torch.nn.functional.cross_entropy``, and turn into real logits, once and with a warning, under anything else.

Two classes carry the same state, because no single kind of object serves both eager mode and the compiler:

* `tensor.LazyLogits`, in eager mode, is a tensor without storage (a wrapper subclass). So
  ``isinstance(x, torch.Tensor)`` holds for trainers and ``ModelOutput``. An object that only *claims* to be a tensor
  through ``__class__`` would be cast to one by C++ code that skips ``__torch_function__``
  (``autograd.Function.apply``, DDP, collectives) and crash. Ours has a ``grad_fn`` that leads to the hidden states and
  the head, and a ``__torch_dispatch__``, so such code gets right values and right gradients too.
* `graphs.TracedLazyLogits`, under ``torch.compile``, is a plain Python object with ``__torch_function__``: the
  compiler cannot build a wrapper subclass within a graph, but follows plain objects with ``fullgraph=True``.

Each module uses those above it:

| module | what is in it |
|---|---|
| `terms`, `fold` | the products and biases that logits are the sum of; what has been done to the sum |
| `state` | what lazy logits would be computed from, and how to do without them |
| `elementwise`, `values`, `indexing` | what operations do to a state: a function an operation |
| `tables` | which function of PyTorch is which operation |
| `base` | what both classes share: views, copies, and the real logits |
| `dispatch` | how an operation of PyTorch finds its way |
| `tensor`, `graphs` | the classes |
"""

from flce.huggingface.lazy.base import is_lazy, make_lazy, register_results, state_of
from flce.huggingface.lazy.graphs import TracedLazyLogits
from flce.huggingface.lazy.tensor import LazyLogits

__all__ = ["LazyLogits", "TracedLazyLogits", "is_lazy", "make_lazy", "register_results", "state_of"]
