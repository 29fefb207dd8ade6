"""`integrations/deepspeed_zero3.py` for 8 steps in two processes; `tests/distributed/` has the other stages."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("deepspeed")
pytest.importorskip("typer", reason="the scripts' command line")


def test_the_script(run_script):
    said = run_script("deepspeed_zero3.py", "--steps=8")
    assert said.count("ZeRO-3 in 2 processes: 8 steps") == 1  # the first process speaks
    assert "fused in 0" in said
    assert "The loss curves agree" in said


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("stage", [2, 3])
def test_on_two_gpus(run_script, stage):
    said = run_script("deepspeed_zero3.py", "--steps=15", f"--stage={stage}", gpu="0,1")
    assert "The loss curves agree" in said
