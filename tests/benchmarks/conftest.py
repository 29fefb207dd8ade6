"""Fixtures for measurements of small problems as users run them on this machine."""

from __future__ import annotations

import gc

import pytest
import torch


@pytest.fixture(autouse=True)
def _steady_heap_again():
    """Freeze all objects, because a measurement begins with `gc.unfreeze`."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Use one thread: more threads slow down small problems, especially on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="module")
def _torch_backend():
    """Use the torch backend on a CPU, as users do, instead of Triton's interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setenv("FLCE_BACKEND", "torch")
        yield
