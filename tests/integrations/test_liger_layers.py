"""`integrations/liger_layers.py`: what it says without a GPU, and with one that Liger's layers and flce's loss run."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="Transformers' Trainer needs it")
pytest.importorskip("typer", reason="the scripts' command line")


def test_needs_a_gpu(run_script):
    said = run_script("liger_layers.py", status=2).splitlines()
    assert len(said) == 1
    assert "cannot run here: Liger's layers are Triton kernels and need a GPU" in said[0]


@pytest.mark.gpu
def test_the_script(run_script):
    pytest.importorskip("liger_kernel")
    said = run_script("liger_layers.py", "--steps=15", gpu="0")
    assert "fused in 15" in said
    assert "The loss curves agree" in said
