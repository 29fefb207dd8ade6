"""Check that every fault of `scripts/plant_faults.py` can be planted."""

from __future__ import annotations

from scripts import plant_faults


def test_every_fault_can_be_planted():
    assert plant_faults.obstacles(plant_faults.read(plant_faults.LIST), plant_faults.ROOT) == []
