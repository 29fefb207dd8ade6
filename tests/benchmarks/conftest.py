"""Small problems, measured the way users would run them on this machine."""

from __future__ import annotations

import gc

import pytest
import torch


@pytest.fixture(autouse=True)
def _steady_heap_again():
    """A measurement begins by giving back to the collector all that was kept from it."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """More cost such small problems time, much of it on a machine with other work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="module")
def _torch_backend():
    """On a CPU measure what users get there, not the interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setenv("FLCE_BACKEND", "torch")
        yield
