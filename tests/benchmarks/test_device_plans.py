"""Tests of predictions for other devices, without running anything there."""

from __future__ import annotations

from benchmarks.device_plans import HEADS, planned, time_over_products
from flce.core.devices import KNOWN_KINDS

TIME_LIMIT = 1.15
SLOWER = ("V100", "V100-32GB", "T4", "RTX-3060", "RTX-3080", "RTX-4080", "RTX-A6000")  # PyTorch's operators, or small
KINDS = [name for name, kind in KNOWN_KINDS.items() if kind.half_flops / kind.bandwidth <= 210 and name not in SLOWER]
WIDE = [name for name, head in HEADS.items() if head.hidden >= 2048]


def times(models: list[str], frozen: bool, share: float) -> dict[tuple[str, str], float]:
    return {
        (kind, model): time_over_products(planned(kind, HEADS[model], frozen, share))
        for kind in KINDS
        for model in models
    }


def test_training_is_fast_where_memory_does_not_bound_it() -> None:
    assert len(KINDS) == 7
    assert max(times(WIDE, frozen=False, share=1.0).values()) <= 1.02 * TIME_LIMIT


def test_training_in_a_share_of_the_memory() -> None:
    """With more memory more plans are fast, and no plan is slower."""
    default, twice = (times(WIDE, frozen=False, share=share) for share in (1 / 24, 1 / 12))
    fast = [sum(time <= 1.02 * TIME_LIMIT for time in found.values()) for found in (default, twice)]
    assert fast[0] >= 16
    assert fast[1] >= 26
    assert all(twice[each] <= 1.01 * default[each] for each in default)


def test_a_frozen_head_is_fast_from_some_width_on() -> None:
    wide = [name for name in WIDE if HEADS[name].hidden >= 4096]
    assert max(times(wide, frozen=True, share=1 / 24).values()) <= 1.02 * TIME_LIMIT
