from __future__ import annotations

import pytest

from tests.distributed import training
from tests.distributed.pair import World


@pytest.mark.parametrize("loss", training.LOSSES)
@pytest.mark.parametrize("wrapping", training.WRAPPINGS)
def test_trains_as_one_process(pair: World, wrapping: str, loss: str) -> None:
    for counts in pair.run(training.compare, wrapping, loss):
        assert counts["stock"] == 0
