"""Comparisons of pipelines, the last stage of which has a patched head, with stock."""

from __future__ import annotations

import pytest

from tests.distributed.pair import World
from tests.helpers import skip_without_gradient_edges

pipelines = pytest.importorskip("tests.distributed.pipelines")


@pytest.mark.parametrize("schedule", pipelines.SCHEDULES)
def test_schedules(pair: World, schedule: str) -> None:
    if "ZeroBubble" in schedule:
        skip_without_gradient_edges()
    pair.run(pipelines.pipelined, schedule)


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_split_by_hand(pair: World, schedule: str) -> None:
    pair.run(pipelines.split_by_hand, schedule)


def test_exported(pair: World) -> None:
    pair.run(pipelines.exported)


def test_of_transformers(pair: World) -> None:
    pytest.importorskip("transformers", minversion="5.20")
    pair.run(pipelines.of_transformers)
