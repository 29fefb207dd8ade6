"""Tests of functions for verl, NeMo-RL and slime with Megatron's models, and of verl's own code of these models."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flce.testing.problem import relative_error
from tests.distributed.test_megatron import (
    VOCAB,
    build,
    call,
    draw_ids,
    expected_results,
    full_logits,
    gradients,
    megatron,
    pytestmark,
)
from tests.processes import in_processes

__all__ = ["pytestmark"]


@in_processes(2)
def test_functions_of_verl_and_slime() -> None:
    """Check results and gradients of lazy and of real logits."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    import megatron_adapters as adapters
    from flce.megatron import install, uninstall

    ids, labels = draw_ids(1, 2, 3), draw_ids(4, 5, 6)
    upstream = torch.linspace(0.5, 2.0, labels.numel()).view(labels.shape)
    with megatron(2):
        model = build(GPTModel, sequence_parallel=True)
        group = parallel_state.get_tensor_model_parallel_group()

        def check(logprobs: Tensor, entropy: Tensor) -> list[Tensor]:
            ((logprobs + 0.3 * entropy) * upstream).sum().backward()
            found = [logprobs.detach(), entropy.detach(), *gradients(model)]
            for value, correct in zip(found, expected or found, strict=True):
                assert relative_error(value, correct) < 2e-5 or not correct.any()
            return found

        expected: list[Tensor] = []
        expected += check(*expected_results(full_logits(model, ids), labels))
        for lazy in (False, True):
            if lazy:
                install(lazy=True)
            logits = call(model, ids)
            names = ["vocab_parallel_entropy", "vocab_parallel_entropy_with_chunking"]
            entropy, chunked = (getattr(adapters, name)(vocab_parallel_logits=logits) for name in names)
            assert chunked.equal(entropy)
            check(adapters.vocab_parallel_log_probs_from_logits(logits.clone(), labels), entropy)
            rows, tokens = call(model, ids).float().flatten(0, 1), labels.flatten()
            found = adapters.calculate_log_probs_and_entropy(rows, tokens, group, with_entropy=True, chunk_size=4)
            assert found[0].shape == (len(tokens), 1)
            assert found[1] is not None
            check(found[0].view(labels.shape), found[1].view(labels.shape))
            detached = adapters.calculate_log_probs_and_entropy(rows, tokens, group, True, with_entropy_grad=False)[1]
            assert detached is not None
            assert not detached.requires_grad
            assert adapters.calculate_log_probs_and_entropy(rows[:0], tokens[:0], group)[0].shape == (0,)
            with pytest.raises(ValueError, match="log_prob_keep_mask must be None"):
                adapters.calculate_log_probs_and_entropy(rows, tokens, group, log_prob_keep_mask=rows > 0)
        uninstall()


@pytest.mark.parametrize("context, pad", [(1, 0), (2, 0), (2, 3)])
@in_processes(2)
def test_function_of_nemo_rl(context: int, pad: int) -> None:
    """Check next tokens of logits that are divided by classes, or by tokens as in context parallelism."""
    from megatron.core import parallel_state as state

    from megatron_adapters import from_parallel_logits_to_logprobs

    target = draw_ids(1, 2, 3)
    target = target[:, : target.shape[1] - pad]
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(3, 8, VOCAB, generator=generator, dtype=torch.float64, requires_grad=True)
    expected = expected_results(full[:, : target.shape[1] - 1], target[:, 1:])[0]
    upstream = torch.linspace(0.5, 2.0, expected.numel()).view(expected.shape)
    (gradient,) = torch.autograd.grad(expected, full, upstream.double())
    with megatron(2 // context, context=context):
        tensor, context_group = state.get_tensor_model_parallel_group(), state.get_context_parallel_group()

        def local(x: Tensor) -> Tensor:
            x = x.detach().chunk(tensor.size(), -1)[tensor.rank()].float()
            chunks = x.chunk(2 * context, 1)
            rank = context_group.rank()
            return x if context == 1 else torch.cat([chunks[rank], chunks[-1 - rank]], 1)

        logits, width = local(full).requires_grad_(), VOCAB // tensor.size()
        classes = width * tensor.rank(), width * (tensor.rank() + 1)
        logprobs = from_parallel_logits_to_logprobs(logits, target, *classes, tensor, cp_group=context_group)
        assert relative_error(logprobs, expected) < 1e-5
        # Each process has all log-probabilities, and the gradient of their sum over the processes.
        logprobs.backward(upstream / context)
        assert logits.grad is not None
        assert relative_error(logits.grad, local(gradient)) < 1e-5
        assert not from_parallel_logits_to_logprobs(logits, target, *classes, tensor, True, context_group).requires_grad
        filtered = SimpleNamespace(top_k=None, top_p=0.9)
        with pytest.raises(ValueError, match="sampling_params must have no top-k or top-p filter"):
            from_parallel_logits_to_logprobs(logits, target, *classes, tensor, sampling_params=filtered)


def import_fused_forward() -> Any:
    """Import verl's file with the kernel of the plugin. Two modules that need Ray and more are simulated."""
    if importlib.util.find_spec("verl") is None:
        pytest.skip("verl is not installed: see docs/trainers.md")
    from tests.integrations.test_verl import KERNEL, import_verl

    import_verl(KERNEL)

    simulated: dict[str, dict[str, Any]] = {
        "verl.utils.megatron_utils": {"unwrap_model": lambda model: model},
        "verl.utils.model": {"CausalLMOutputForPPO": SimpleNamespace},
        "verl.utils.device": {"is_npu_available": False},
    }
    for name, contents in simulated.items():
        module: Any = ModuleType(name)
        vars(module).update(contents)
        sys.modules[name] = module
    fused = import_verl("verl.models.mcore.model_forward_fused")
    importlib.import_module("verl_plugin").install()
    return fused


@pytest.mark.parametrize("mode", ["legacy", "hook"])
@in_processes(2)
def test_fused_forward_of_verl(mode: str) -> None:
    """Check verl's own forward of older versions of Megatron-Core, and its output processor for newer versions."""
    from megatron.core.models.gpt import GPTModel

    class NewModel(GPTModel):
        """Simulation of Megatron-Core 0.18, which calls an output processor."""

        def forward(
            self, *args: Any, output_processor: Any = None, output_processor_context: Any = None, **kwargs: Any
        ):
            self.processor, self.context = output_processor, output_processor_context
            return super().forward(*args, **kwargs)

        def _postprocess(self, hidden_states: Tensor, labels: Tensor, **others: Any) -> Any:
            if self.processor is None:
                return super()._postprocess(hidden_states=hidden_states, labels=labels, **others)
            return self.processor(
                hidden_states=hidden_states, output_layer=self.output_layer, output_weight=None, labels=labels,
                context=self.context, config=self.config, loss_mask=None, scale_logits=None,
            )  # fmt: skip

    with megatron(2):
        fused = import_fused_forward()
        model = build(NewModel if mode == "hook" else GPTModel, any_attention=True, sequence_parallel=True)
        ids, present = draw_ids(1, 2, 3), torch.ones(3, 8, dtype=torch.bool)
        present[0, 5:] = present[2, 2:] = False
        labels, counted = ids.roll(-1, 1), present.clone()
        counted[:, 0] = False
        logprobs, entropy = expected_results(full_logits(model, ids) / 0.7, labels)
        expected = {"log_probs": logprobs * counted, "entropy": entropy * present}
        upstream = torch.linspace(0.5, 2.0, 24).view(3, 8)
        ((expected["log_probs"] - 0.2 * expected["entropy"]) * upstream).sum().backward()
        correct_gradients = gradients(model)

        fused.patch_fused_forward(model)
        assert hasattr(model, "forward_backup") == (mode == "legacy")
        forward = fused.fused_forward_model_gen()
        found = forward(model, ids, None, present, labels, counted, temperature=0.7, multi_modal_inputs={})
        for name, correct in expected.items():
            assert relative_error(found[name], correct) < 1e-5
        ((found["log_probs"] - 0.2 * found["entropy"]) * upstream).sum().backward()
        for value, correct in zip(gradients(model), correct_gradients, strict=True):
            assert relative_error(value, correct) < 2e-5 or not correct.any()
