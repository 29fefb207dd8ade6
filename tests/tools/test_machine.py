"""Tests of devices by name, and of sizes as text."""

from __future__ import annotations

import pytest
import torch

from flce.core import devices
from flce.core.devices import find_device
from flce.core.sizes import GIB, MIB, parse_bytes, parse_sizes, size_text
from flce.tools import machine

CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.mark.parametrize(
    "text, size",
    [("256MiB", 256 * MIB), (" 1.5 GiB", 3 * GIB // 2), ("80GB", 80 * 10**9), ("2tib", 2 << 40), ("64MB", 64 * 10**6)],
)
def test_bytes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "80", "GiB", "-1GiB", "0MiB", "0.0000001MiB", "3 bytes", "1e3MiB"])
def test_no_bytes(text: str) -> None:
    with pytest.raises(ValueError, match=f"expected a size such as 80GiB, 80GB or 256MiB, got '{text}'"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["8192,4096,128256", " 8192 , 4096, 128256", "8192x4096x128256"])
def test_sizes(text: str) -> None:
    assert parse_sizes(text) == (8192, 4096, 128256)


@pytest.mark.parametrize("text", ["8,4", "8,4,2,1", "8,-4,16", "8,0,16", "8,4,x", "", "9999999999,8,8"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="expected N,H,V as 3 positive numbers, at most 1073741824, got"):
        parse_sizes(text)
    assert parse_sizes("8,4", "rows,columns") == (8, 4)


@pytest.mark.parametrize(
    "size, text",
    [
        (0, "0"),
        (300, "300 bytes"),
        (9.994 * MIB, "9.99 MiB"),
        (823 * MIB, "823 MiB"),
        (7.84 * GIB, "7.84 GiB"),
        (139.8 * GIB, "140 GiB"),
        (745058 * GIB, "745,058 GiB"),
    ],
)
def test_size_text(size: float, text: str) -> None:
    assert size_text(size) == text


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (devices, machine):
        monkeypatch.setattr(module, "list_devices", lambda: [FIRST, SECOND, CPU])
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)


@pytest.mark.parametrize(
    "name, found", [(None, SECOND), ("cuda", SECOND), ("cuda:0", FIRST), (FIRST, FIRST), ("cpu", CPU), ("cpu:0", CPU)]
)
@pytest.mark.usefixtures("two_gpus")
def test_a_device(name: str | torch.device | None, found: torch.device) -> None:
    assert find_device(name) == found


@pytest.mark.parametrize("name", ["cuda:2", "cpu:1", "meta", "toaster"])
@pytest.mark.usefixtures("two_gpus")
def test_no_device(name: str) -> None:
    with pytest.raises(ValueError, match=f"there is no device '{name}' here: give one of cuda:0, cuda:1, cpu"):
        find_device(name)
