"""Architecture by architecture: one training step of small models, stock and patched.

The default run tests a sample of different architectures. ``ALL_ARCHITECTURES=1`` tests all of them, and
``ALL_ARCHITECTURES=others`` tests the architectures outside of the sample.
``python -m tests.huggingface.architectures > docs/models.md`` writes the results as a table.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch._dynamo.exc import Unsupported

import flce
from flce.huggingface import LazyLogits
from tests.huggingface import architectures as small

transformers = pytest.importorskip("transformers")

WHICH = os.environ.get("ALL_ARCHITECTURES", "")
ALL = WHICH not in ("", "0")
# A bias after the head, a softcap, factors of several kinds, experts, MLA, a state space, a hybrid, a padded or
# shared head, log-probabilities, a decoder with an encoder, a masked language model, images; several heads, a head
# outside of the output embedding, a product without a head, writes to columns, a special class of head.
SAMPLE = """
    causal-gpt2 causal-cohere causal-deepseek_v3 causal-falcon_h1 causal-gemma3_text causal-granitemoe causal-mamba
    causal-prophetnet causal-qwen3_next seq2seq-bart seq2seq-t5 masked-bert image-llava
    causal-musicgen seq2seq-fsmt masked-mobilebert image-chameleon image-idefics
""".split()  # noqa: SIM905

# Architectures with operations on logits that have no lazy form: two add the logits of several heads, one writes to
# columns, one has a learned factor for each class.
COMPUTE_LOGITS = {
    (small.MATERIALISES, name)
    for name in ("causal-musicgen", "causal-musicgen_melody", "image-chameleon", "causal-dory")
}
# Architectures that stock Transformers cannot build or train here, with a part of the error. Another error of stock
# fails the test, and so does an entry whose training succeeds.
STOCK_FAILS = {
    # This model expects all layers to share keys and values of another model, but at least one layer to compute them.
    "causal-gemma4_assistant": "layer types producing a cache is different than",
    # A policy of a robot, without a vocabulary: its labels are movements, and its loss is a squared error.
    "image-pi0": "missing 1 required positional argument",
}
STOCK_4_FAILS = {
    "causal-qdqbert": "requires the pytorch-quantization library",
    "masked-qdqbert": "requires the pytorch-quantization library",
    "causal-speech_to_text_2": "'Speech2Text2SinusoidalPositionalEmbedding' object has no attribute 'weight'",
    "causal-transfo-xl": "type_as() missing 1 required positional arguments",
    "masked-wav2vec2": "got an unexpected keyword argument 'input_ids'",
    "image-florence2": "Expected input batch_size (2) to match target batch_size (32)",
}
# The versions of Transformers of both tables. With other versions, a test in which stock fails is skipped.
KNOWN = {"4.56": STOCK_4_FAILS, "5.23": STOCK_FAILS}
DECLARED = KNOWN.get(".".join(transformers.__version__.split(".")[:2]))


# Dense models of many makers, for torch.compile.
DENSE = """
    arcee bloom cohere cohere2 ernie4_5 exaone4 falcon gemma gemma2 gemma3_text glm glm4 gpt2 gpt_neox gptj granite
    helium hunyuan_v1_dense llama mistral nemotron olmo olmo2 opt phi phi3 qwen2 qwen3 seed_oss smollm3 stablelm
    starcoder2
""".split()  # noqa: SIM905
COMPILED = [f"causal-{name}" for name in ("cohere", "gpt_neox")]


def select_architectures(sample: list[str], all_names: set[str] | None = None) -> list[Any]:
    """Return the architectures of this run: of ``all_names`` or of ``sample``."""
    every = [a for a in small.architectures() if all_names is None or a.id in all_names]
    if ALL:
        return [pytest.param(a, id=a.id) for a in every if WHICH != "others" or a.id not in sample]
    return [pytest.param(a, id=a.id) for a in every if a.id in sample]


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> None:
    small.silence()


@pytest.mark.timeout(3 * small.SECONDS)
@pytest.mark.parametrize("architecture", select_architectures(SAMPLE))
def test_training_step(architecture: small.Architecture) -> None:
    result = small.examine(architecture)
    if DECLARED is None and result.status == small.STOCK_FAILS:
        pytest.skip(f"stock: {result.reason}")
    expected = (DECLARED or {}).get(architecture.id)
    if expected is not None:
        assert result.status == small.STOCK_FAILS, "trains: take it out of the declared failures"
        assert expected in result.reason
        pytest.skip(f"stock: {result.reason}")
    assert result.status == small.FUSED or (result.status, architecture.id) in COMPUTE_LOGITS, result.reason


def step(model: Any, architecture: small.Architecture, is_compiled: bool = True) -> tuple[torch.Tensor, Any]:
    torch.compiler.reset()
    torch.manual_seed(2)
    call = torch.compile(model, fullgraph=True, backend="eager") if is_compiled else model
    outputs = call(**small.batch(architecture))
    outputs.loss.backward()
    return outputs.loss.detach(), outputs.logits


@pytest.mark.parametrize("architecture", select_architectures(COMPILED, {f"causal-{name}" for name in DENSE}))
def test_compile_without_graph_breaks(architecture: small.Architecture) -> None:
    stock = small.build(architecture)
    patched = flce.patch_model(copy.deepcopy(stock))
    try:
        loss, logits = step(patched, architecture)
    except Unsupported as error:
        with pytest.raises(Unsupported):
            step(stock, architecture)
        pytest.skip(f"stock: {str(error).splitlines()[0]}")
    stock_loss, _ = step(stock, architecture, is_compiled=False)
    assert isinstance(logits, LazyLogits)
    assert not logits.is_materialized
    torch.testing.assert_close(loss, stock_loss, rtol=1e-5, atol=1e-5)
    for (name, want), got in zip(stock.named_parameters(), patched.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-5, atol=1e-5, msg=f"{name}: {{}}".format)


@pytest.mark.skipif(DECLARED is None, reason="failures are declared for other versions")
def test_the_declared_failures_are_of_this_version() -> None:
    assert set(DECLARED or {}) <= {a.id for a in small.architectures()}


def test_the_sample_is_of_this_version() -> None:
    """Older versions of Transformers lack some of the sample, but not most."""
    names = {a.id for a in small.architectures()}
    assert len(names & set(SAMPLE)) >= 10


@pytest.mark.parametrize("name", ["causal-qwen3", "image-qwen3_vl"])
def test_token_accuracy_makes_no_logits(name: str) -> None:
    """Compute the accuracy like TRL's ``SFTTrainer`` without Liger, from a model's outputs."""
    (architecture,) = [a for a in small.architectures() if a.id == name] or pytest.skip(f"no {name} here")

    model = small.build(architecture)
    inputs = small.batch(architecture)
    with torch.no_grad():
        predicted = model(**inputs).logits.argmax(-1)
    inputs["labels"][:, 3::2] = predicted[:, 2:-1:2]  # half of the labels: the untrained model predicts these tokens

    def accuracy(outputs: Any) -> torch.Tensor:
        shift_logits = outputs.logits[..., :-1, :].contiguous()
        shift_labels = inputs["labels"][..., 1:].contiguous()
        predictions = shift_logits.argmax(dim=-1)
        mask = shift_labels != -100
        return ((predictions == shift_labels) & mask).sum() / mask.sum()

    expected = accuracy(model(**inputs))
    outputs = flce.patch_model(model, on_materialize="raise")(**inputs)
    assert torch.equal(accuracy(outputs), expected)
    assert 0.3 < expected < 1.0
    assert not outputs.logits.is_materialized
