"""The contract in Triton: host-side launches, nothing else."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce.backends.contract import RowInputs, RowOutputs, Tile
from flce.backends.triton.cross_entropy import cross_entropy_kernel
from flce.backends.triton.scale import scale_kernel
from flce.problem import LossSpec, accumulation_dtype

# Columns that a program holds at once, and its warps: (fewest columns, block, warps), the first that applies. The
# fastest of 2,048 to 32,768 columns on 4 to 32 warps on an H200, in ms for 525 million logits:
#   V = 128,256: 0.75 with 16,384 on 16, 0.83 with 4,096 on 8.   V = 50,257: 1.23 and 0.85.
# Wide blocks leave few rows in flight, so that the second pass finds part of its row in the L2 cache; narrow ones
# waste less on the last block.
LAUNCHES = ((65536, 16384, 16), (0, 4096, 8))
SCALE_BLOCK = 4096
# Enough programs to fill any GPU several times.
SCALE_PROGRAMS = 2048


class TritonBackend:
    name = "triton"

    def statistics(
        self, logits: Tensor, rows: RowInputs, spec: LossSpec, tile: Tile, state: Tensor | None, out: RowOutputs
    ) -> None:
        _launch(logits, None, rows, spec, tile, state, out, out.normalizer, None)

    def gradient(
        self,
        logits: Tensor,
        grad: Tensor,
        rows: RowInputs,
        spec: LossSpec,
        tile: Tile,
        normalizer: Tensor,
        upstream: Tensor | None,
    ) -> None:
        _launch(logits, grad, rows, spec, tile, None, None, normalizer, upstream)

    def loss_and_gradient(
        self, logits: Tensor, grad: Tensor, rows: RowInputs, spec: LossSpec, tile: Tile, out: RowOutputs
    ) -> None:
        _launch(logits, grad, rows, spec, tile, None, out, out.normalizer, None)

    def scale_(self, x: Tensor, factor: Tensor) -> None:
        _scale(x, x, factor)

    def scale_cast(self, x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        out = torch.empty_like(x, dtype=dtype)
        _scale(x, out, factor)
        return out


def _launch(
    logits: Tensor,  # (rows, cols), unit column stride
    grad: Tensor | None,  # like logits; None: no gradient
    rows: RowInputs,
    spec: LossSpec,
    tile: Tile,
    state: Tensor | None,
    out: RowOutputs | None,  # None: no statistics, `normalizer` is read
    normalizer: Tensor,
    upstream: Tensor | None,
) -> None:
    num_rows, cols = logits.shape
    if num_rows == 0:
        return
    block, warps = next(launch[1:] for launch in LAUNCHES if cols >= launch[0])
    while block > max(16, triton.next_power_of_2(cols)):  # a short row needs no more than its own length
        block, warps = block // 2, max(1, warps // 2)
    bias = None if rows.bias is None else rows.bias[tile.start : tile.start + cols]
    scale = spec.logit_scale / (spec.temperature if spec.softcap is None else spec.softcap)

    def pointer(t: Tensor | None) -> Tensor:
        return logits if t is None else t  # what a flag switches off is never read

    def output(name: str) -> Tensor:
        return pointer(None if out is None else getattr(out, name))

    with _device_of(logits):
        cross_entropy_kernel[(num_rows,)](
            logits,
            pointer(grad),
            rows.target,
            pointer(bias),
            pointer(rows.class_weight),
            pointer(rows.token_weight),
            pointer(upstream),
            rows.constants,
            pointer(state),
            output("loss"),
            output("z_loss"),
            normalizer,
            output("logprob"),
            output("entropy"),
            output("argmax"),
            logits.stride(0),
            0 if grad is None else grad.stride(0),
            0 if state is None else state.stride(0),
            normalizer.stride(0),
            cols,
            tile.room,
            tile.start,
            tile.vocab_size,
            spec.ignore_index,
            scale,
            1.0 if spec.softcap is None else spec.softcap / spec.temperature,
            spec.label_smoothing,
            spec.z_loss,
            ACCUM=tl.float64 if accumulation_dtype(logits.dtype) == torch.float64 else tl.float32,
            STATISTICS=out is not None,
            LOAD_STATE=not tile.first,
            STORE_STATE=not tile.last,
            FINISH=tile.last,
            GRADIENT=grad is not None,
            HAS_SCALE=scale != 1.0,
            HAS_BIAS=bias is not None,
            HAS_SOFTCAP=spec.softcap is not None,
            HAS_CLASS_WEIGHT=rows.class_weight is not None,
            HAS_TOKEN_WEIGHT=rows.token_weight is not None,
            HAS_UPSTREAM=upstream is not None,
            HAS_SMOOTHING=spec.label_smoothing != 0.0,
            HAS_Z_LOSS=spec.z_loss != 0.0,
            WANT_LOGPROB=out is not None and out.logprob is not None,
            WANT_ENTROPY=out is not None and out.entropy is not None,
            WANT_ARGMAX=out is not None and out.argmax is not None,
            BLOCK=block,
            num_warps=warps,
        )


def _scale(x: Tensor, out: Tensor, factor: Tensor) -> None:
    if x.numel() == 0:
        return
    with _device_of(x):
        programs = min(SCALE_PROGRAMS, triton.cdiv(x.numel(), SCALE_BLOCK))
        scale_kernel[(programs,)](x, out, factor, x.numel(), IN_PLACE=x is out, BLOCK=SCALE_BLOCK, num_warps=8)


def _device_of(x: Tensor) -> torch.cuda.device:
    # Triton launches on the current device, which need not be the tensor's. -1: leave it (CPU interpreter).
    return torch.cuda.device(x.device.index if x.device.type == "cuda" else -1)
