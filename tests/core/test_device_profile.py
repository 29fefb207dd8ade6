"""``FLCE_PROFILE``: a file that changes the record of this machine's GPU. The GPU of these tests is simulated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flce
from flce.core.devices import KNOWN_KINDS, device_record
from tests.hopper import clear_device_caches, fake_h100

CUDA = torch.device("cuda")
NAME = "NVIDIA H100 80GB HBM3"


@pytest.fixture(autouse=True)
def an_h100(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fake_h100(monkeypatch, 79 << 30)
    yield
    clear_device_caches()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "profile.json"
    monkeypatch.setenv("FLCE_PROFILE", str(path))
    return path


def planned(**how: Any) -> flce.ChunkPlan:
    return flce.plan(8192, 4096, 128256, torch.bfloat16, **how)


@pytest.mark.parametrize("name", [NAME, "h100", "nvidia-h100 80gb hbm3"])
def test_its_fields_are_those_of_the_device(file: Path, name: str) -> None:
    file.write_text(json.dumps({"name": name, "own_products": False, "memory": 23 << 30, "bandwidth": 1008e9}))
    found = device_record(CUDA)
    changed = KNOWN_KINDS["H100"]._replace(own_products=False, memory=23 << 30, bandwidth=1008e9, profile=str(file))
    assert found == changed


def test_a_plan_is_as_it_says_and_names_it(file: Path) -> None:
    of_h100 = planned(device_kind="H100")
    assert of_h100.case.has_fused_products
    file.write_text(json.dumps({"name": "H100", "own_products": False, "memory": 23 << 30}))
    made = planned()
    assert not made.case.has_fused_products
    assert made.workspace_bytes <= (23 << 30) / 24
    assert f"on H100 (triton backend, profile {file})" in str(made)
    # The profile does not apply to a GPU of another machine or to the CPU.
    assert planned(device_kind="H100") == of_h100
    assert "profile" not in str(planned(device="cpu"))


def test_every_rate_of_a_profile_counts(file: Path) -> None:
    """A Hopper GPU gets the rates of an H200 unless the profile sets other rates."""
    seconds = planned(device_kind="H100").seconds
    file.write_text(json.dumps({"name": "H100", "half_flops": 100e12}))
    assert planned().seconds > 5 * seconds


def test_it_is_read_once(file: Path) -> None:
    file.write_text(json.dumps({"name": "H100", "own_products": False}))
    assert not device_record(CUDA).own_products
    file.write_text("{")
    assert not device_record(torch.device("cuda", 0)).own_products


def test_with_a_process_group_it_is_not_used(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks must compute the same plan, also if the group is created after the first plan."""
    file.write_text(json.dumps({"name": "H100", "own_products": False}))
    assert not planned().case.has_fused_products
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert planned().case.has_fused_products
    assert "profile" not in str(planned())


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "cannot be read: No such file"),
        ("{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        ("[1]", "must be an object with the name of the device"),
        ('{"name": "H100", "color": 1}', "has a field 'color', expected some of name, arch, multiprocessors"),
        ('{"name": "H100", "memory": "23GiB"}', "must have a positive whole number as memory, got '23GiB'"),
        ('{"name": "H100", "multiprocessors": 0}', "must have a positive whole number as multiprocessors, got 0"),
        ('{"name": "H100", "cache": true}', "must have a positive whole number as cache, got True"),
        ('{"name": "H100", "bandwidth": NaN}', "must have a positive number as bandwidth, got nan"),
        ('{"name": "H100", "own_products": 0}', "must have true or false as own_products, got 0"),
        ('{"name": "H100", "arch": "sm90"}', "must have a text such as 'sm_89' as arch, got 'sm90'"),
        ('{"name": "RTX-4090"}', f"is for 'RTX-4090', and this device is '{NAME}'"),
    ],
)
def test_an_error_names_the_file(file: Path, text: str | bytes | None, message: str) -> None:
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match="FLCE_PROFILE") as error:
        planned()
    assert str(error.value).startswith(f"FLCE_PROFILE={file} {message}")
