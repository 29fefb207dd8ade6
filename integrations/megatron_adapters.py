"""Functions with the names, arguments and results of verl's, NeMo-RL's and slime's, which flce computes.

They take logits of one process's classes: ordinary logits, or the lazy logits that Megatron's models return after
`flce.megatron.install(lazy=True)`. docs/rl-frameworks.md shows how to replace the frameworks' functions.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flce.megatron import vocab_parallel_entropy as vocab_parallel_entropy  # verl's name and arguments
from flce.megatron import vocab_parallel_logprobs


def vocab_parallel_log_probs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of each label, like verl's function (0.9.1)."""
    logprobs: Tensor = vocab_parallel_logprobs(logits, labels)
    return logprobs


def vocab_parallel_entropy_with_chunking(vocab_parallel_logits: Tensor, chunk_size: int = 2048) -> Tensor:
    """Return the entropy of each token, like verl's function (0.9.1). `chunk_size` has no effect."""
    return vocab_parallel_entropy(vocab_parallel_logits)


def from_parallel_logits_to_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: Any,
    inference_only: bool = False,
    cp_group: Any = None,
    chunk_size: int | None = None,
    sampling_params: Any = None,
) -> Tensor:
    """Return the log-probability (B, S - 1) of each next token, like NeMo-RL's function (commit 7ea279a).

    `vocab_parallel_logits`: (B, S / context-parallel processes, V / processes). `target`: (B, S), not shifted. The
    logits are not stored, so `chunk_size` has no effect.

    Raises:
        ValueError: `sampling_params` has a top-k or top-p filter.
    """
    if sampling_params is not None and ((sampling_params.top_k or 0) > 0 or sampling_params.top_p not in (None, 1.0)):
        raise ValueError(f"sampling_params must have no top-k or top-p filter, got {sampling_params}: use NeMo-RL's")
    count, length = 1 if cp_group is None else cp_group.size(), target.shape[1]
    labels = F.pad(target[:, 1:], (0, 1 + count * vocab_parallel_logits.shape[1] - length))
    if count > 1:  # each process has one chunk from the start of the sequence, and its mirror image from the end
        chunks, rank = labels.chunk(2 * count, 1), cp_group.rank()
        labels = torch.cat([chunks[rank], chunks[-1 - rank]], 1)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        logprobs = vocab_parallel_logprobs(vocab_parallel_logits, labels, tp_group)
        if count > 1:
            from torch.distributed.nn.functional import all_gather

            halves = [part.chunk(2, 1) for part in all_gather(logprobs.contiguous(), cp_group)]
            logprobs = torch.cat([*(first for first, _ in halves), *(last for _, last in halves[::-1])], 1)
    return logprobs[:, : length - 1]


def calculate_log_probs_and_entropy(
    logits: Tensor,
    tokens: Tensor,
    tp_group: Any,
    with_entropy: bool = False,
    chunk_size: int = -1,
    log_prob_keep_mask: Tensor | None = None,
    with_entropy_grad: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities (T, 1) and entropies (T,) or None, like slime's function (commit 624b824).

    `logits`: (T, V / processes). The logits are not stored, so `chunk_size` has no effect.

    Raises:
        ValueError: `log_prob_keep_mask` is given.
    """
    if log_prob_keep_mask is not None:
        raise ValueError("log_prob_keep_mask must be None, got a tensor: with a rollout top-p use slime's function")
    if not len(tokens):
        empty = logits.new_zeros(0)
        return empty, empty if with_entropy else None
    if not with_entropy:
        return vocab_parallel_logprobs(logits, tokens, tp_group).unsqueeze(-1), None
    logprobs, entropy = vocab_parallel_logprobs(logits, tokens, tp_group, with_entropy=True)
    return logprobs.unsqueeze(-1), entropy if with_entropy_grad else entropy.detach()
