"""What a schedule is."""

from __future__ import annotations

from typing import ClassVar

from flce.engine.case import Case, ceil_div
from flce.engine.pass_context import PassContext

# The sizes of a schedule that is not for such a call.
NO_SIZES = range(0)


def sizes_up_to(size: int) -> range:
    """All sizes to this one."""
    return range(1, max(1, size) + 1)


class Schedule:
    """One way through the tiles of logits: a frozen dataclass of sizes, and the loops.

    A schedule comes in several sizes, of which the planner chooses one: tokens of a chunk or classes of a block, as a
    rule. A larger size takes more memory and should be faster.

    Attributes:
        strategy: "tokens" or "vocab", as users choose it. With "vocab" gradients are made in backward.
        deferred: whether gradients are made in backward, from logits that are made again. A schedule that is not
            deferred is never taken for ``reduction="none"``, whose upstream gradient it does not know.
        can_count_on_device: whether the first chunk can be begun before the host knows how many tokens there are.
        in_registers: whether logits stay in registers where the backend's products can do that. False for a schedule
            that makes losses and gradients of one tile in one pass.
        sized_by_tokens: whether a size is a number of tokens. Then `ChunkOptions.chunk_rows` chooses it; any other
            schedule has to take `Case.chunk_rows` into account by itself.
        multiples: sizes that are multiples of these may be faster.
    """

    strategy: ClassVar[str] = "tokens"
    deferred: ClassVar[bool] = False
    can_count_on_device: ClassVar[bool] = False
    in_registers: ClassVar[bool] = True
    sized_by_tokens: ClassVar[bool] = True
    multiples: ClassVar[tuple[int, ...]] = (16, 128, 256)

    def __init_subclass__(cls) -> None:
        if cls.strategy == "vocab" and not cls.deferred:
            raise TypeError(f"{cls.__name__} must be deferred: with strategy 'vocab' gradients are made in backward")

    @classmethod
    def sizes(cls, c: Case) -> range:
        """From the smallest to the largest; `NO_SIZES` if the schedule is not for such a call."""
        raise NotImplementedError

    @classmethod
    def from_size(cls, c: Case, size: int) -> Schedule:
        """The schedule of one of these sizes."""
        raise NotImplementedError

    def forward(self, s: PassContext) -> None:
        """Losses and, unless `deferred`, gradients."""
        raise NotImplementedError

    def backward(self, s: PassContext) -> None:
        """Gradients, if `deferred`."""
        raise NotImplementedError

    def for_shard(self, c: Case) -> Schedule | None:
        """The schedule of a process of a divided head that has fewer classes, where this is that of the process with
        most: both meet equally often, with the same tokens. None: they do with any that makes gradients in backward."""
        return None

    def tile_sizes(self, c: Case) -> tuple[int, list[int]]:
        """Tokens of a chunk, and classes of each block."""
        return getattr(self, "rows", c.num_tokens), [c.vocab_size]

    def describe(self, c: Case) -> str:
        rows, widths = self.tile_sizes(c)
        chunks, blocks = ceil_div(c.num_tokens, max(1, rows)), len(widths)
        text = f"{chunks} chunks of {rows} tokens" if chunks > 1 else f"all {c.num_tokens} tokens at once"
        if blocks == 1:
            return f"{text}, all classes"
        sizes = f"{widths[0]}" if len(set(widths[:-1])) == 1 else f"{max(widths)} to {widths[-2]}"
        return f"{text}, {blocks} blocks of {sizes} classes"
