"""Tests of `flce.megatron` with models of Megatron-Core in processes of gloo. Megatron computes the expected values."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import math
import os
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import flce
from demo import is_fused
from flce import ChunkOptions
from flce.huggingface import MaterializedLogitsWarning
from flce.testing.problem import relative_error
from megatron_cpu import replace_cuda
from tests.processes import in_processes, world

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the tests replace CUDA"),
]

VOCAB, LENGTH, BATCH = 48, 8, 3
COMMON: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "mtp_loss_scaling_factor": 0.1}
COMMON |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "gradient_accumulation_fusion": False}
COMMON |= {"use_cpu_initialization": True, "pipeline_dtype": torch.float32}


class Attention(nn.Module):
    """A core attention that returns the values. Megatron's needs Transformer Engine for packed or divided sequences."""

    def __init__(self, **others: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *others: Any, **more: Any) -> Tensor:
        return value.flatten(2)


@contextlib.contextmanager
def megatron(tensor: int = 1, pipeline: int = 1, context: int = 1) -> Iterator[None]:
    """Initialize Megatron's groups of processes, and run its code on a CPU."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor, pipeline, context_parallel_size=context)
    try:
        with replace_cuda():
            yield
        dist.barrier()  # no process closes a group that another process still uses
    finally:
        # Threads of each group of gloo wake up 100 times a second.
        for group in filter(None, parallel_state._global_process_group_list):
            dist.destroy_process_group(group)
        parallel_state.destroy_model_parallel()


def build(model_class: Any, tied: bool = False, any_attention: bool = False, **settings: Any) -> Any:
    """Return a model with the same weights in each call. ``any_attention``: use `Attention`."""
    from megatron.core import parallel_state as state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer import TransformerConfig

    sizes = {
        "tensor_model_parallel_size": state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": state.get_pipeline_model_parallel_world_size(),
        "context_parallel_size": state.get_context_parallel_world_size(),
    }
    torch.manual_seed(0)
    config = TransformerConfig(**{**COMMON, **sizes, **settings})
    spec, is_last = get_gpt_layer_local_spec(), state.is_pipeline_last_stage()
    if any_attention:
        spec.submodules.self_attention.submodules.core_attention = Attention
    mtp = get_gpt_mtp_block_spec(config, spec, False) if config.mtp_num_layers and is_last else None
    return model_class(
        config=config, transformer_layer_spec=spec, vocab_size=VOCAB, max_sequence_length=2 * LENGTH,
        pre_process=state.is_pipeline_first_stage(), post_process=is_last,
        share_embeddings_and_output_weights=tied, mtp_block_spec=mtp, position_embedding_type="none",
    )  # fmt: skip


def draw_ids(*seeds: int) -> Tensor:
    return torch.stack([torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(k)) for k in seeds])


def call(model: Any, ids: Tensor, **arguments: Any) -> Any:
    masked = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return model(ids, torch.arange(LENGTH).expand(ids.shape), masked, **arguments)


def gradients(model: Any) -> list[Tensor]:
    """Return the gradients. With sequence parallelism, gradients from shares of the tokens are summed."""
    found = [(p, torch.zeros_like(p) if p.grad is None else p.grad) for p in model.parameters()]
    for parameter, grad in found:
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(grad)
    model.zero_grad()
    return [grad for _, grad in found]


def run(model: Any, ids: Tensor, labels: Tensor, mask: Tensor) -> Any:
    """Return the losses, the gradients of the mean of unmasked losses, the logged losses, and whether flce was used."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker = {}
    losses = call(model, ids, labels=labels, loss_mask=mask.clone())
    (losses * mask).mean().backward()
    logged = [value for name, value in MTPLossLoggingHelper.tracker.items() if name.endswith("values")]
    return losses.detach(), gradients(model), logged, is_fused(losses)


def assert_equal_runs(expected: Any, found: Any) -> None:
    assert (expected[3], found[3]) == (False, True)
    torch.testing.assert_close(found[:3], expected[:3], rtol=1e-5, atol=1e-6)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True},
    "sequence parallel": {"sequence_parallel": True},
    "MTP": {"mtp_num_layers": 2},
    "recomputation": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "all": {"tied": True, "sequence_parallel": True, "mtp_num_layers": 2, "calculate_per_token_loss": True},
}


def compare_losses(processes: int, case: str) -> None:
    from megatron.core.models.gpt import GPTModel

    from flce.huggingface.lazy import state
    from flce.megatron import FlceGPTModel

    ids, labels, mask = draw_ids(1, 2, 3), draw_ids(4, 5, 6), torch.ones(BATCH, LENGTH)
    mask[:, :2] = 0.0
    with megatron(processes):
        stock, fused = (build(model_class, **CASES[case]) for model_class in (GPTModel, FlceGPTModel))
        with mock.patch.object(state, "fused_linear_cross_entropy", wraps=flce.fused_linear_cross_entropy) as calls:
            assert_equal_runs(run(stock, ids, labels, mask), run(fused, ids, labels, mask))
        assert calls.call_count == 1  # for all MTP layers
        with torch.no_grad():
            expected = call(stock.eval(), ids, labels=labels)
            torch.testing.assert_close(call(fused.eval(), ids, labels=labels), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("processes, case", [*((2, case) for case in CASES), (4, "all")])
def test_losses_and_gradients(processes: int, case: str) -> None:
    """Compare losses of tokens, gradients, and logged losses of MTP layers; in evaluation too."""
    world(processes).run(compare_losses, processes, case)


@in_processes(2)
def test_labels_that_megatron_rolls_in_another_way() -> None:
    """The losses of MTP layers are computed before Megatron's code has their labels. Wrong losses are NaN."""
    from flce.megatron import FlceGPTModel

    with megatron(2), mock.patch("flce.megatron.roll_tensor", lambda labels, **how: (labels, None)):
        _, _, logged, _ = run(build(FlceGPTModel, mtp_num_layers=1), draw_ids(1), draw_ids(2), torch.ones(1, LENGTH))
    assert logged[0].isnan().all()


def count_correct_labels(logits: Tensor, labels: Tensor, loss_mask: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """Simulation of the function of Megatron-Core since 0.19."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region as gather

    mask = loss_mask.bool()
    return ((gather(logits).argmax(-1).t() == labels) & mask).sum().float(), mask.sum().float()


@pytest.mark.parametrize("detached", [False, True])
@in_processes(2)
def test_counts_of_correct_labels(detached: bool) -> None:
    """Megatron-Core since 0.19 counts correct labels of MTP layers, for which logits are computed."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import multi_token_prediction

    from flce.megatron import FlceGPTModel

    name, ids = "_compute_mtp_acceptance_counts", draw_ids(*range(24))
    mask = torch.ones(ids.shape)
    mask[0, :3] = 0.0

    class Counts:
        def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Any:
            loss = super().compute_language_model_loss(labels, logits)  # type: ignore[misc]
            counts.append(getattr(multi_token_prediction, name)(logits, labels, mask, None, None))
            return loss

    found = []
    with megatron(2), pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", MaterializedLogitsWarning)
        patch.setattr(multi_token_prediction, name, count_correct_labels, raising=False)
        for base in (GPTModel, FlceGPTModel):
            counts: list[Any] = []
            model = build(type("Model", (Counts, base), {}), mtp_num_layers=2)
            model.config.mtp_detach_heads = detached
            multi_token_prediction.MTPLossLoggingHelper.tracker = {}
            call(model, ids, labels=ids, loss_mask=mask.clone())
            found.append(counts)
    assert found[1] == found[0]
    assert sum(correct for correct, _ in found[0]) > 3


def train(model_class: Any, steps: int, overlap: bool = False, rate: float = 1e-2, **settings: Any) -> Tensor:
    """Return the losses of micro-batches, from Megatron's schedule, DDP and distributed optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model = build(model_class, **settings, finalize_model_grads_func=finalize_model_grads)
    distributed = {"use_distributed_optimizer": True}
    ddp_config = DistributedDataParallelConfig(**distributed, grad_reduce_in_fp32=True, overlap_grad_reduce=overlap)
    ddp = DistributedDataParallel(model.config, ddp_config, model)  # main_grad
    model.config.no_sync_func = ddp.no_sync if overlap else None  # Megatron's training loop sets it too
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=rate, clip_grad=0.0, **distributed), [ddp])
    mask = torch.ones(BATCH, LENGTH).index_fill(1, torch.tensor([LENGTH - 1]), 0.0)

    def forward_step(batches: Iterator[Tensor], model: Any) -> tuple[Tensor, Callable[..., Any]]:
        def loss(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            total = (losses * mask).sum()
            return total, mask.sum().int(), {"loss": total.detach() / mask.sum()}

        ids = next(batches)
        return call(model, ids, labels=ids.roll(-1, 1), loss_mask=mask.clone()), loss

    curve = []
    for step in range(steps):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        outputs = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iter([draw_ids(1, 2, 3 + step), draw_ids(4, 5, 6 + step)]),
            model=[ddp], num_microbatches=2, seq_length=LENGTH, micro_batch_size=BATCH,
        )  # fmt: skip
        optimizer.step()
        curve += [output["loss"] for output in outputs]
    return torch.tensor(curve)


def watch_added() -> Any:
    """Return a context with the calls in which backward gets the problem with the gradients to add to."""
    from flce.ops import gradient_accumulation, linear_cross_entropy

    return mock.patch.object(linear_cross_entropy, "replace_added", wraps=gradient_accumulation.replace_added)


def compare_training(tensor: int, pipeline: int, context: int, adds: bool, **settings: Any) -> None:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    from flce.megatron import FlceGPTModel

    class Model(FlceGPTModel):
        flce_options = ChunkOptions(gradient_accumulation_fusion=adds)

    steps = int(os.environ.get("MEGATRON_STEPS", 6))
    settings |= {"calculate_per_token_loss": True, "sequence_parallel": tensor > 1, "any_attention": context > 1}
    with megatron(tensor, pipeline, context), watch_added() as calls:
        expected, found = (
            train(model_class, steps=steps, rate=0.18 / steps, **settings) for model_class in (GPTModel, Model)
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        if parallel_state.is_pipeline_last_stage():
            assert found[-1] < 0.9 * found[0]
            assert [bool(call.args[1].dw_targets) for call in calls.call_args_list] == [adds] * 2 * steps


@pytest.mark.parametrize(
    "parallel, adds, tied, mtp_num_layers",
    [
        ((1, 2, 1), True, True, 1),
        ((2, 1, 1), True, True, 1),
        ((1, 1, 2), False, True, 1),
        ((2, 2, 1), True, False, 2),
    ],
    ids=["PP", "TP", "CP", "TP and PP"],
)
def test_training(parallel: tuple[int, int, int], adds: bool, tied: bool, mtp_num_layers: int) -> None:
    """Compare losses of float32 training. ``adds``: backward adds dW to `main_grad`. MEGATRON_STEPS=20 is slower."""
    world(math.prod(parallel)).run(compare_training, *parallel, adds, tied=tied, mtp_num_layers=mtp_num_layers)


def compare_training_into_main_grad(tied: bool, overlap: bool) -> None:
    from megatron.core.models.gpt import GPTModel

    import flce.megatron

    settings: dict[str, Any] = {"calculate_per_token_loss": True, "bf16": True, "params_dtype": torch.bfloat16}
    settings["tied"] = tied
    with megatron(2):
        expected = train(GPTModel, 4, overlap, **settings)
        flce.megatron.install()
        fused = train(GPTModel, 4, overlap, **settings)
        flce.megatron.install(gradient_accumulation_fusion=True)
        with watch_added() as calls:
            found = train(GPTModel, 4, overlap, **settings)
        flce.megatron.uninstall()
    assert [call.args[1].dw_targets[0].dtype for call in calls.call_args_list] == [torch.float32] * 8
    torch.testing.assert_close(found, expected, rtol=5e-3, atol=0)
    torch.testing.assert_close(found, fused, rtol=2e-3, atol=0)


@pytest.mark.parametrize("tied, overlap", [(True, False), (False, True)])
def test_training_into_main_grad(tied: bool, overlap: bool) -> None:
    """Backward adds dW to the float32 main_grad of a bfloat16 head, with the hooks of Megatron's DDP."""
    world(2).run(compare_training_into_main_grad, tied, overlap)


def full_logits(model: Any, ids: Tensor) -> Tensor:
    """Return the logits (B, S, V) in float64, of the model's hidden states and head."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region as gather

    return gather(call(model, ids)).double()


def expected_results(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(-1, labels[..., None])[..., 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("settings", [{}, {"sequence_parallel": True, "mtp_num_layers": 1}], ids=["plain", "SP, MTP"])
@in_processes(2)
def test_logprobs_of_lazy_logits(settings: dict[str, Any]) -> None:
    """Check results of selected tokens at a temperature, with gradients, and the same functions of real logits."""
    from megatron.core.models.gpt import GPTModel

    from flce.megatron import FlceGPTModel, vocab_parallel_entropy, vocab_parallel_logprobs

    class LazyModel(FlceGPTModel):
        flce_lazy, flce_options = True, ChunkOptions(chunk_rows=8)

    def results(logits: Tensor, labels: Tensor) -> Any:
        return vocab_parallel_logprobs(logits, labels), vocab_parallel_entropy(logits)

    ids, labels = draw_ids(1, 2, 3), draw_ids(4, 5, 6)
    labels[0, 3] = -1
    chosen = labels >= 0
    upstream = torch.linspace(0.5, 2.0, int(chosen.sum()))
    with megatron(2):
        stock, lazy = (build(model_class, tied=True, **settings) for model_class in (FlceGPTModel, LazyModel))
        without_mtp = build(GPTModel, tied=True, **{**settings, "mtp_num_layers": None})
        torch.testing.assert_close(call(stock, ids), call(without_mtp, ids), rtol=0, atol=0)

        def check(model: Any, logprobs: Tensor, entropy: Tensor) -> list[Tensor]:
            """Compare results and gradients, and return them."""
            ((logprobs + 0.5 * entropy) * upstream).sum().backward()
            found = [logprobs.detach(), entropy.detach(), *gradients(model)]
            for value, correct in zip(found, expected or found, strict=True):
                assert relative_error(value, correct) < 2e-5 or not correct.any()
            return found

        expected: list[Tensor] = []
        expected += check(stock, *expected_results(full_logits(stock, ids)[chosen] / 0.7, labels[chosen]))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(F, "linear", None)  # no logits
            for function in (results, functools.partial(vocab_parallel_logprobs, with_entropy=True)):
                logits = call(lazy, ids).float().div(0.7)
                assert tuple(logits.shape) == (*ids.shape, VOCAB // 2)
                check(lazy, *function(logits[chosen], labels[chosen]))
            assert not any(value[0, 3] for value in vocab_parallel_logprobs(logits, labels, with_entropy=True))
        logits = call(stock, ids) / 0.7
        assert type(logits) is Tensor
        check(stock, *(value[chosen] for value in vocab_parallel_logprobs(logits, labels, with_entropy=True)))


@in_processes(2)
def test_entropy_of_masked_classes() -> None:
    """Classes with a logit of -inf have no share in the entropy of real logits, and a gradient of 0."""
    from flce.megatron import vocab_parallel_entropy

    full = torch.randn(5, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    expected = torch.distributions.Categorical(logits=full[:, 2:]).entropy()
    (gradient,) = torch.autograd.grad(expected.sum(), full)
    with megatron(2):
        masked = full.detach().index_fill(1, torch.tensor([0, 1]), -torch.inf)
        local = masked.chunk(2, 1)[dist.get_rank()].requires_grad_()
        entropy = vocab_parallel_entropy(local)
        entropy.sum().backward()
    torch.testing.assert_close(entropy, expected)
    torch.testing.assert_close(local.grad, gradient.chunk(2, 1)[dist.get_rank()])


@in_processes(2)
def test_casts_of_a_model_in_half_precision() -> None:
    """Megatron's wrapper casts the logits to float32, or not (NeMo-RL's `defer_fp32_logits`). Both are lazy."""
    from megatron.core.transformer.module import Float16Module

    from flce.huggingface.lazy import is_lazy
    from flce.megatron import FlceGPTModel, vocab_parallel_logprobs

    class LazyModel(FlceGPTModel):
        flce_lazy = True

    ids, labels = draw_ids(1, 2, 3), draw_ids(4, 5, 6)
    with megatron(2):
        model = build(LazyModel, bf16=True, params_dtype=torch.bfloat16)
        wrapped = Float16Module(model.config, model)
        results = []
        for dtype, arguments in ((torch.float32, {}), (torch.bfloat16, {"fp32_output": False})):
            logits = call(wrapped, ids, **arguments)
            assert is_lazy(logits)
            assert logits.dtype == dtype
            results.append(vocab_parallel_logprobs(logits, labels))
        torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


@in_processes(2)
def test_other_operations_compute_the_logits() -> None:
    """Check values and gradients of an operation without a lazy form, whose result is of one process's classes."""
    from megatron.core.models.gpt import GPTModel

    from flce.megatron import install, uninstall

    ids = draw_ids(1, 2, 3)
    with megatron(2), contextlib.closing(SimpleNamespace(close=uninstall)):
        model, results = build(GPTModel, sequence_parallel=True), []
        for lazy in (False, True):
            if lazy:
                install(lazy=True)
            largest = call(model, ids).argmax(-1)  # has a lazy form, of all classes
            with pytest.warns(MaterializedLogitsWarning) if lazy else contextlib.nullcontext():
                total = call(model, ids).logsumexp(-1)
            (total * torch.linspace(0.5, 2.0, LENGTH)).sum().backward()
            results.append([largest, total.detach(), *gradients(model)])
        torch.testing.assert_close(results[1], results[0])


@in_processes(2)
def test_install_and_a_softcap() -> None:
    """Check `install` for existing models, and a subclass of the output layer as in Megatron-Bridge's Gemma models."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from flce.megatron import install, uninstall

    class SoftcapLayer(ColumnParallelLinear):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            logits, bias = super().forward(*args, **kwargs)
            return 0.5 * torch.tanh(logits / 0.5), bias

    methods = GPTModel._postprocess, GPTModel.compute_language_model_loss
    ids, labels, mask = draw_ids(1, 2, 3), draw_ids(4, 5, 6), torch.ones(BATCH, LENGTH)
    labels[0, :2] = -1
    mask[0, :2] = 0.0
    with megatron(2):
        model = build(GPTModel, sequence_parallel=True)
        model.output_layer.__class__ = SoftcapLayer
        expected = run(model, ids, labels, mask)
        expected[0][0, :2] = 0.0  # losses of negative labels have no meaning in Megatron
        for _ in range(2):
            install()
        assert_equal_runs(expected, run(model, ids, labels, mask))
        with pytest.raises(TypeError, match="options"):
            install(options="none")  # type: ignore[arg-type]
        model.output_layer.config = copy.copy(model.config)
        model.output_layer.config.defer_embedding_wgrad_compute = True
        with pytest.raises(ValueError, match="flce needs defer_embedding_wgrad_compute=False"):
            call(model, ids, labels=labels)
        uninstall()
        assert methods == (GPTModel._postprocess, GPTModel.compute_language_model_loss)


@in_processes(2)
def test_output_processor() -> None:
    """Simulate a `GPTModel` of Megatron-Core 0.18, which calls the function after its decoder, also after `install`."""
    from megatron.core.models.gpt import GPTModel

    import flce.megatron

    def postprocess(self: Any, hidden_states: Tensor, labels: Tensor, **others: Any) -> Any:
        return flce.megatron.output_processor(
            hidden_states=hidden_states, output_layer=self.output_layer,
            output_weight=self.shared_embedding_or_output_weight(), labels=labels, config=self.config, context=context,
            scale_logits=lambda logits: logits * 1.5, compute_language_model_loss=self.compute_language_model_loss,
            loss_mask=None, input_ids=None, position_ids=None, attention_mask=None, decoder_input=None,
            inference_context=None, packed_seq_params=None, runtime_gather_output=None,
        )  # fmt: skip

    ids, labels = draw_ids(1, 2, 3), draw_ids(4, 5, 6)
    with megatron(2):
        model = build(GPTModel, tied=True, sequence_parallel=True)
        weight, logits = model.shared_embedding_or_output_weight(), 1.5 * full_logits(model, ids)
        losses = -expected_results(logits, labels)[0]
        losses.mean().backward()
        expected = gradients(model)
        with mock.patch.object(GPTModel, "_postprocess", postprocess):
            context: Any = {"outputs": ("logprob", "entropy"), "temperature": 0.7}
            found = call(model, ids, labels=labels)
            for value, correct in zip(vars(found).values(), expected_results(logits / 0.7, labels), strict=False):
                assert relative_error(value, correct) < 1e-5
            context = None
            plain = call(model, ids, labels=labels)
        with mock.patch.dict(flce.megatron._STOCK, _postprocess=postprocess):
            flce.megatron.install(gradient_accumulation_fusion=True)
            weight.main_grad = torch.zeros_like(weight, requires_grad=False)
            with_options = call(model, ids, labels=labels)
        flce.megatron.uninstall()
        for value in (plain, with_options):
            assert relative_error(value, losses) < 1e-5
            value.mean().backward()
            if value is with_options:  # main_grad has the gradient of the head, and .grad of the embedding
                assert relative_error(weight.grad, expected[0]) > 0.1
                weight.grad += weight.main_grad
            for gradient, correct in zip(gradients(model), expected, strict=True):
                assert relative_error(gradient, correct) < 1e-5
