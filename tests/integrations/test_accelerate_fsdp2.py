"""`integrations/accelerate_fsdp2.py` for 8 steps in two processes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("typer", reason="the scripts' command line")
if not torch.distributed.is_available():
    pytest.skip("PyTorch without torch.distributed", allow_module_level=True)


def test_the_script(run_script):
    said = run_script("accelerate_fsdp2.py", "--steps=8")
    assert said.count("FSDP2 in 2 processes: 8 steps") == 1  # the first process speaks
    assert "The loss curves agree" in said


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_on_two_gpus(run_script, precision):
    said = run_script("accelerate_fsdp2.py", "--steps=15", f"--mixed-precision={precision}", gpu="0,1")
    assert "The loss curves agree" in said


def test_a_precision_that_there_is_not(run_script):
    said = run_script("accelerate_fsdp2.py", "--mixed-precision=fp8", status=2)
    assert "it is no or bf16" in said
    assert "Traceback" not in said
