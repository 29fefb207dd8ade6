"""Architecture by architecture: one training step of small models, stock and patched.

The everyday run takes a sample of unlike architectures; ``FLCE_ALL_ARCHITECTURES=1`` takes all of them.
``python -m tests.huggingface.architectures > docs/models.md`` keeps the results as a table.
"""

from __future__ import annotations

import os

import pytest

from tests.huggingface import architectures as small

transformers = pytest.importorskip("transformers")

ALL = os.environ.get("FLCE_ALL_ARCHITECTURES", "") not in ("", "0")
# A bias behind the head, a softcap, factors of several kinds, experts, MLA, a state space, a hybrid, a padded or
# shared head, log-probabilities, a decoder behind an encoder, a masked language model, images.
SAMPLE = """
    causal-gpt2 causal-cohere causal-deepseek_v3 causal-falcon_h1 causal-gemma3_text causal-granitemoe causal-mamba
    causal-prophetnet causal-qwen3_next seq2seq-bart seq2seq-t5 masked-bert image-llava
""".split()  # noqa: SIM905

# What the fused loss does not reach, and why. An entry that has come true fails its test: take it out.
NOT_FUSED = {
    "causal-musicgen": small.NOT_PATCHED,  # one head for each codebook
    "causal-musicgen_melody": small.NOT_PATCHED,
    "image-blip": small.NOT_PATCHED,  # does not say which its output embedding is
    "image-chameleon": small.MATERIALISES,  # writes into the columns of image tokens
    "image-idefics": small.NOT_PATCHED,  # a head in two parts, with a forward of its own
    "image-nemotron_h_omni": small.NOT_PATCHED,  # as blip
    "masked-mobilebert": small.NOT_FUSED,  # multiplies by its embedding and a second matrix, not by a head
    "masked-perceiver": small.NOT_PATCHED,  # as blip
    "seq2seq-fsmt": small.NOT_PATCHED,  # calls its output embedding an nn.Embedding
}


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> None:
    small.silence()


@pytest.mark.timeout(3 * small.SECONDS)
@pytest.mark.parametrize(
    "architecture",
    [pytest.param(a, id=a.id) for a in small.architectures() if ALL or a.id in SAMPLE],
)
def test_training_step(architecture: small.Architecture) -> None:
    result = small.examine(architecture)
    if result.status == small.STOCK_FAILS:
        assert architecture.id not in SAMPLE, result.reason
        pytest.skip(f"stock: {result.reason}")
    assert result.status == NOT_FUSED.get(architecture.id, small.FUSED), result.reason


def test_the_sample_is_of_this_version() -> None:
    """Older versions of Transformers lack some; most have to be there."""
    names = {a.id for a in small.architectures()}
    assert len(names & set(SAMPLE)) >= 10
