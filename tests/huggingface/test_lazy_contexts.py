"""`lazy_logits`: lazy logits without gradients and in evaluation mode, as reinforcement learning needs them."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flce
from flce.huggingface import LazyLogits, MaterializedLogitsError, lazy_logits
from tests.helpers import parametrize_pairs
from tests.huggingface.scripts import IDS, Build, Calls, Compare

pytestmark = pytest.mark.usefixtures("fail_on_materialize")

NO_GRADIENTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "gradients": contextlib.nullcontext,
}


def logprob_of(logits: Any) -> Tensor:
    picked: Tensor = (logits[:, :-1] / 0.7).log_softmax(-1).gather(-1, IDS[:, 1:, None]).squeeze(-1)
    return picked


def is_lazy_now(model: Any) -> bool:
    with torch.no_grad():
        return type(model(input_ids=IDS).logits) is LazyLogits


@parametrize_pairs(name=["Llama", "Gemma2"], training=[True, False], how=list(NO_GRADIENTS))
def test_values_are_stocks(name: str, training: bool, how: str, compare: Compare) -> None:
    script = """
        model = patch(build(name).train(training), on_materialize="raise")
        with lazy_logits(model) if patched else contextlib.nullcontext(), NO_GRADIENTS[how]():
            logits = model(input_ids=IDS).logits
            lazy(logits)
            value = logprob_of(logits)
            note(value, logits.argmax(-1))
            lazy(logits)
        fused(2)
        with torch.no_grad():
            assert type(model(input_ids=IDS).logits) is Tensor"""
    compare(script, name=name, training=training, how=how)


def logit_less_lse(logits: Any) -> Tensor:
    value: Tensor = logits[:, :-1].gather(-1, IDS[:, 1:, None]).squeeze(-1) - logits[:, :-1].logsumexp(-1)
    return value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reads", [logprob_of, logit_less_lse])
def test_the_ratio_is_1(reads: Callable[[Any], Tensor], dtype: torch.dtype, build: Build) -> None:
    model = flce.patch_model(build("Llama").to(dtype), on_materialize="raise")
    with lazy_logits(model.eval()), torch.no_grad():
        old = reads(model(input_ids=IDS).logits)
    new = reads(model.train()(input_ids=IDS).logits)
    assert new.requires_grad
    assert bool(((new - old).exp() == 1).all())


def test_nested_and_left_by_an_error(build: Build) -> None:
    model, other = (flce.patch_model(build("Llama", num_hidden_layers=1).eval()) for _ in range(2))
    with lazy_logits(model, other):
        with pytest.raises(KeyError), lazy_logits(model):
            raise KeyError
        assert is_lazy_now(model)
        assert is_lazy_now(other)
    assert not is_lazy_now(model)
    assert not is_lazy_now(other)
    with lazy_logits(other):
        assert not is_lazy_now(model)


def test_copies_that_are_made_within_it_are_not_in_it(build: Build) -> None:
    model = flce.patch_model(build("Llama", num_hidden_layers=1).eval())
    with lazy_logits(model):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        assert [is_lazy_now(each) for each in (model, *copies)] == [True, False, False]


def test_bad_models(build: Build) -> None:
    model = flce.patch_model(build("Llama", num_hidden_layers=1).eval())
    with pytest.raises(ValueError, match="got a Linear that is not patched"), lazy_logits(model, nn.Linear(2, 2)):
        pass
    assert not is_lazy_now(model)
    not_a_model: Any = "model"
    with pytest.raises(TypeError, match="got str"), lazy_logits(not_a_model):
        pass


def test_stock_code_where_it_is_forbidden(build: Build) -> None:
    model = flce.patch_model(build("Llama", num_hidden_layers=1).eval(), on_materialize="raise")
    model.lm_head.half()
    with lazy_logits(model), torch.no_grad(), pytest.raises(MaterializedLogitsError, match="would run stock code"):
        model(input_ids=IDS)


@pytest.mark.parametrize("training", [True, False])
def test_generate_is_stocks(training: bool, build: Build, fused_calls: Calls) -> None:
    model = flce.patch_model(build("Llama").train(training), on_materialize="raise")
    for options in ({"num_beams": 1}, {"num_beams": 3}, {"do_sample": True}):
        options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, **options}

        def generate(options: dict[str, Any] = options) -> Any:
            torch.manual_seed(3)
            return model.generate(IDS, output_logits=True, **options)

        outside = generate()
        with lazy_logits(model):
            inside = generate()
            assert is_lazy_now(model)
        assert torch.equal(inside.sequences, outside.sequences)
        assert all(type(logits) is Tensor for logits in inside.logits)
        assert all(map(torch.equal, inside.logits, outside.logits))
    assert not fused_calls
    with lazy_logits(model):
        with pytest.raises(ValueError, match="max_new_tokens"):
            model.generate(IDS, max_new_tokens=0, max_length=1)
        assert is_lazy_now(model)


def test_a_reference_without_its_adapter(build: Build, fused_calls: Calls) -> None:
    """PEFT's wrapper calls `generate` of the model."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    model = flce.patch_model(peft.get_peft_model(build("Llama"), config).eval(), on_materialize="raise")
    with lazy_logits(model), torch.no_grad():
        with model.disable_adapter():
            reference = logprob_of(model(input_ids=IDS).logits)
            text = model.generate(input_ids=IDS, max_new_tokens=3, do_sample=False)
        assert text.shape[0] == 2
        assert len(fused_calls) == 1
        with_adapter = logprob_of(model(input_ids=IDS).logits)
    stock = build("Llama").eval()(input_ids=IDS).logits
    torch.testing.assert_close(reference, logprob_of(stock).detach())
    assert not torch.allclose(with_adapter, reference)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_model(build: Build) -> None:
    model = flce.patch_model(build("Llama", num_hidden_layers=1).eval(), on_materialize="raise")
    want = model(input_ids=IDS).logits.detach()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for within in (False, True, False):
        with lazy_logits(model) if within else contextlib.nullcontext(), torch.no_grad():
            logits = compiled(input_ids=IDS).logits
        assert (type(logits) is LazyLogits) == within
        torch.testing.assert_close(logprob_of(logits), logprob_of(want))


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_step(build: Build) -> None:
    """The compiler creates one graph for calls within the context, and one for other calls."""
    model = flce.patch_model(build("Llama", num_hidden_layers=1).eval(), on_materialize="raise")
    graphs: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    run = torch.compile(lambda: logprob_of(model(input_ids=IDS).logits), backend=backend, fullgraph=True)
    with torch.no_grad():
        want = run()
        with lazy_logits(model):
            torch.testing.assert_close(run(), want)
        torch.testing.assert_close(run(), want)
    assert ["flce.linear_logprobs" in code for code in graphs] == [False, True]
