"""Peak memory and tokens a second of training steps of whole models. Contenders change one model in turn.

A step is forward with labels, backward, the optimizer if the case has one, and freeing the gradients. As in Trainer,
only the loss of the model's output is stored, so that logits do not live during backward unless it needs them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

import flce
from benchmarks.benchmark import Benchmark, Plan, plan_cases
from benchmarks.cases import BenchCase, Contender, Step, needs_package, select_contenders, stand_ins
from benchmarks.contenders import TRL_UNUSED
from benchmarks.measure import BenchMeter, Prepared, ReadyContender, Sample, release
from benchmarks.real_heads import SKIPPED, train_on_texts
from benchmarks.runs import BenchResult, Entry
from benchmarks.tables import NONE, Columns, Table, gibibytes, milliseconds, overview, ratio, table_of
from flce.core.log import sampled_passes
from flce.core.sizes import MIB
from flce.huggingface import NotFusedWarning
from flce.tools.machine import DTYPES

# Fields of Transformers' config of each architecture.
FIELDS = "model_type hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size vocab_size"


def configured(*values: Any, positions: int = 131072, **others: Any) -> dict[str, Any]:
    sizes = dict(zip(FIELDS.split(), values, strict=True))
    return {"tie_word_embeddings": True} | sizes | others | {"max_position_embeddings": positions}


LLAMA: dict[str, Any] = {"head_dim": 64, "rope_theta": 500000.0, "rms_norm_eps": 1e-5}
WIDE = LLAMA | {"head_dim": 128, "tie_word_embeddings": False}
QWEN: dict[str, Any] = {"head_dim": 128, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6}
GEMMA: dict[str, Any] = {"head_dim": 256, "rms_norm_eps": 1e-6, "sliding_window": 512, "query_pre_attn_scalar": 256}
ARCHITECTURES = {
    "Llama-3.2-1B": configured("llama", 2048, 16, 32, 8, 8192, 128256, **LLAMA),
    "Qwen3-0.6B": configured("qwen3", 1024, 28, 16, 8, 3072, 151936, **QWEN),
    "Gemma-3-270m": configured("gemma3_text", 640, 18, 4, 1, 2048, 262144, positions=32768, **GEMMA),
    "SmolLM2-135M": configured("llama", 576, 30, 9, 3, 1536, 49152, positions=8192, **LLAMA),
    "Llama-3-8B, 2 layers": configured("llama", 4096, 2, 32, 8, 14336, 128256, **WIDE),
    "tiny-llama": configured("llama", 32, 2, 2, 1, 64, 2000, positions=128),
    "tiny-llama, untied": configured("llama", 32, 2, 4, 2, 64, 2000, positions=128, tie_word_embeddings=False),
}
# Names in `integrations/real_models.py`. Their configuration is read with their weights.
REAL = {"Gemma-3-270m": "gemma3", "SmolLM2-135M": "smollm2"}
RANDOM, OF_REAL_MODEL, TRAINED = WEIGHTS = "random", "real", "trained here"
TRAINED_LOSS, TRAINED_STEPS = 3.0, 200

# The end of a training step, after forward and backward. The gradients are freed in any case.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer] | None] = {
    "none": None,
    "sgd": torch.optim.SGD,
    "sgd-momentum": functools.partial(torch.optim.SGD, momentum=0.9),
    "adamw": torch.optim.AdamW,
}


@dataclass(frozen=True)
class ModelCase(BenchCase):
    model: str
    batch: int
    sequence: int
    dtype: str = "bfloat16"
    optimizer: str = "none"
    budgets_mib: tuple[int, ...] = ()  # workspace budgets, a separate contender for each
    contenders: tuple[str, ...] | None = None  # only these; None or (): all
    checkpointing: bool = True  # of gradients
    lora_rank: int = 0  # of PEFT's adapters of all linear layers except the head; only adapters are trained then
    weights: str = RANDOM  # `OF_REAL_MODEL` and `TRAINED` have a batch of Python code instead of random tokens
    processes: str = ""  # in words: the processes that share these tokens, and how the model is divided

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    @property
    def title(self) -> str:
        return f"{self.model}, {self.setting}"

    @property
    def setting(self) -> str:
        """All fields except the model, as text."""
        parts = [f"{self.batch} x {self.sequence} tokens{self.processes}", self.dtype]
        parts += [f"LoRA of rank {self.lora_rank}"] * bool(self.lora_rank)
        parts += [f"weights: {self.weights}"] * (self.weights != RANDOM)
        parts += ["no checkpointing"] * (not self.checkpointing) + [self.optimizer] * (self.optimizer != "none")
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"config": ARCHITECTURES[self.model]}


def build(case: ModelCase, device: torch.device, seed: int = 0) -> nn.Module:
    """Return the model, allocated on the device, in training mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    attention: dict[str, Any] = {"attn_implementation": "sdpa"}
    model: Any
    if case.weights == OF_REAL_MODEL:
        import real_models

        folder = real_models.model_folder(REAL[case.model])
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[case.dtype], **attention)
        model.to(device)
    else:
        config = AutoConfig.for_model(**ARCHITECTURES[case.model])
        dtype = torch.float32 if case.weights == TRAINED else DTYPES[case.dtype]
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, **attention)
    if case.weights == TRAINED:
        train_on_texts(model, device, TRAINED_LOSS, TRAINED_STEPS)
        model.to(DTYPES[case.dtype])
    if case.lora_rank and needs_peft(device) is None:
        add_lora(model, case.lora_rank)
    if case.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained: nn.Module = model.train()
    return trained


def add_lora(model: Any, rank: int) -> None:
    """Add adapters of this rank to all linear layers except the head, and freeze all other weights; 0: no change."""
    if rank:
        from peft import LoraConfig

        model.add_adapter(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Return the bytes between two steps: weights, buffers, and states of the optimizer."""
    tensors = [*model.parameters(), *model.buffers()]  # tied weights are given once
    for state in optimizer.state.values() if optimizer is not None else ():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def make_batch(case: ModelCase, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Return tokens. They are also the labels, which the model shifts."""
    if case.weights != RANDOM:
        from transformers import AutoTokenizer

        import real_models

        tokenizer = AutoTokenizer.from_pretrained(real_models.model_folder(REAL.get(case.model, "smollm2")))
        ids = real_models.token_ids(tokenizer, real_models.texts()["code"], SKIPPED + case.tokens)
        return ids[SKIPPED:].view(case.batch, case.sequence).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    vocab = ARCHITECTURES[case.model]["vocab_size"]
    return torch.randint(vocab, (case.batch, case.sequence), device=device, generator=generator)


@dataclass(frozen=True)
class ModelContender(Contender):
    applied: Callable[[Any], AbstractContextManager[object]]  # the model is changed inside
    call: dict[str, Any] = field(default_factory=dict, kw_only=True)  # more arguments for the model's forward


@contextlib.contextmanager
def ours(model: nn.Module, **options: Any) -> Iterator[None]:
    flce.patch_model(model, options=flce.ChunkOptions(**options) if options else None)
    try:
        yield
    finally:
        flce.unpatch_model(model)


@contextlib.contextmanager
def liger(model: nn.Module, fused_linear_cross_entropy: bool = True, **kernels: bool) -> Iterator[None]:
    """Apply Liger's kernels, and afterwards restore methods of modules and names in the model's file."""
    patch = importlib.import_module("liger_kernel.transformers.monkey_patch")
    attributes = [(module.__dict__, dict(module.__dict__)) for module in model.modules()]
    names = vars(sys.modules[type(model).__module__])
    before = [*attributes, (names, dict(names))]
    try:
        kernels["fused_linear_cross_entropy"] = fused_linear_cross_entropy
        patch._apply_liger_kernel_to_instance(model=model, **kernels)
        yield
    finally:
        for present, saved in before:
            present.clear()
            present.update(saved)


@contextlib.contextmanager
def ours_and_ligers_layers(model: nn.Module, **options: Any) -> Iterator[None]:
    with liger(model, fused_linear_cross_entropy=False), ours(model, **options):
        yield


@contextlib.contextmanager
def trl_head(model: Any, install: Callable[[], object] | None = None, **head: Any) -> Iterator[None]:
    """Change the model as the constructors of TRL's trainers do, stock or after a call of `install`."""
    before = dict(vars(model))
    with stand_ins(TRL_UNUSED):
        trainer = importlib.import_module("trl.trainer.grpo_trainer")
        integration = importlib.import_module("flce.huggingface.trl")
        if install is not None:
            install()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", NotFusedWarning)  # TRL's kernel would be measured
            trainer.add_fused_lm_head(model, **head)
            yield
    finally:
        integration.uninstall()
        if flce.is_patched(model):
            flce.unpatch_model(model)
        vars(model).clear()
        vars(model).update(before)


needs_peft = needs_package("peft", "peft", cuda=False)
only_the_loss = functools.partial(liger, rope=False, rms_norm=False, swiglu=False, geglu=False)
needs_liger = needs_package("liger_kernel.transformers.monkey_patch", "liger-kernel")


def peer(name: str, title: str, applied: Callable[[Any], Any], **call: Any) -> ModelContender:
    return ModelContender(name, title, "peer", applied, unavailable=needs_liger, call=call)


# In the order of measurement: a deadline cuts off the last. A model passes arguments of its forward that it does not
# have to the loss.
CONTENDERS = [
    ModelContender("ours", "flce", "ours", ours),
    peer("liger-loss", "Liger, only the loss", only_the_loss),
    peer("liger", "Liger, all its kernels", liger),
    peer("ours-liger-layers", "flce, with Liger's layers", ours_and_ligers_layers),
    ModelContender("stock", "stock", "stock", contextlib.nullcontext),
]
sampled: dict[str, Any] = {"sample_below": 2.0**-12}
sampled_and_ligers_layers = functools.partial(ours_and_ligers_layers, **sampled)
needs_trl = needs_package("trl.trainer.grpo_trainer", "trl", cuda=False, stands_in=TRL_UNUSED)
# Measured only if a case names them.
NAMED = [
    ModelContender("ours-sampled", "flce, sampled gradients", "ours", functools.partial(ours, **sampled)),
    peer("ours-sampled-liger-layers", "flce, sampled gradients, with Liger's layers", sampled_and_ligers_layers),
    ModelContender("trl", "TRL's kernel", "peer", trl_head, unavailable=needs_trl, call={"fused_lm_head": True}),
]


def contenders_of(case: ModelCase) -> list[ModelContender]:
    """Return the contenders of a case: the first (flce), one for each budget, and the others."""
    if (missing := needs_package("transformers", "transformers", cuda=False)(torch.device("cpu"))) is not None:
        raise ValueError(f"models need Transformers: {missing}")
    found = list(select_contenders([*CONTENDERS, *NAMED], case.contenders) if case.contenders else CONTENDERS)
    for mib in reversed(case.budgets_mib):
        applied = functools.partial(ours, max_workspace_bytes=mib * MIB)
        found.insert(1, ModelContender(f"ours-budget-{mib}", f"flce, {mib} MiB budget", "ours", applied))
    if case.lora_rank and needs_peft(torch.device("cpu")) is not None:
        found = [replace(contender, unavailable=needs_peft) for contender in found]
    return found


MODELS = ("Llama-3.2-1B", "Qwen3-0.6B")
TINY = ModelCase("tiny-llama", 2, 64, dtype="float32", budgets_mib=(1,))
SHORT = ModelCase(MODELS[0], 4, 8192, budgets_mib=(384,), contenders=("ours", "liger-loss", "stock"))
QUOTED = replace(SHORT, budgets_mib=(), contenders=("ours", "liger-loss", "liger", "ours-liger-layers", "stock"))
REAL_NAMES = ("ours", "ours-sampled", *(QUOTED.contenders or ())[1:], "ours-sampled-liger-layers", "trl")
OF_TRAINED = [
    *(replace(QUOTED, model=m, weights=OF_REAL_MODEL, contenders=REAL_NAMES) for m in REAL),
    replace(QUOTED, weights=TRAINED, contenders=REAL_NAMES),
]
# Without checkpointing the peak is in the loss, so a budget lowers it. Stock has 118 GiB there.
SETTINGS: list[dict[str, Any]] = [{}, {"checkpointing": False, "budgets_mib": (256,)}, {"lora_rank": 16}]
PRESETS: dict[str, Callable[[], Plan]] = {
    # Seconds on a CPU, for the tests; half a minute of one large GPU; three minutes; six minutes.
    "tiny": lambda: plan_cases([replace(TINY, **SETTINGS[1]), replace(TINY, **SETTINGS[2])], 2, 1.0),
    "h200-short": lambda: plan_cases([SHORT], rounds=3, seconds=4.0),
    # For README.md and docs/performance.md.
    "h200-pages": lambda: plan_cases([replace(QUOTED, model=m, **s) for s in SETTINGS for m in MODELS], 3, 4.0),
    "h200": lambda: plan_cases(
        [replace(SHORT, model=m, budgets_mib=(384, 1024), contenders=None) for m in MODELS], rounds=4, seconds=6.0
    ),
    # Real models, and one that is trained first, because gradients of random weights are dense. Three minutes.
    "real-models": lambda: plan_cases(OF_TRAINED, rounds=3, seconds=2.0),
}


@dataclass
class TrainingStep:
    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    batch: torch.Tensor
    call: dict[str, Any] = field(default_factory=dict)
    loss: torch.Tensor | None = None
    backward: Callable[[torch.Tensor], object] = torch.Tensor.backward

    def __call__(self) -> None:
        try:
            loss = self.model(input_ids=self.batch, labels=self.batch, use_cache=False, **self.call).loss
            self.backward(loss)
            if self.optimizer is not None:
                self.optimizer.step()
            self.loss = loss.detach()
        finally:
            self.model.zero_grad()


def record_step(step: Any, result: BenchResult, sample: Sample) -> None:
    """Record the loss and the memory of a step. `held_bytes` is used if the memory before the step cannot be read."""
    if step.loss is not None:
        result.loss = float(step.loss)
    if sampled_passes:
        result.sampled = (result.sampled or 0) + sampled_passes["sampled"]
        result.dense = (result.dense or 0) + sampled_passes["dense"]
        sampled_passes.clear()
    if sample.workspace_bytes is None:
        return
    held = held_bytes(step.model, step.optimizer) if sample.held_bytes is None else sample.held_bytes
    result.workspace_bytes = max(result.workspace_bytes or 0, sample.workspace_bytes)
    result.peak_bytes = max(result.peak_bytes or 0, held + sample.workspace_bytes)
    if result.reserved_bytes is None:  # of the first complete step, which found an empty cache
        result.reserved_bytes = sample.reserved_bytes


def share_model(model: nn.Module, device: torch.device, step_of: Callable[[Any], Step]) -> Prepared:
    """Return the meter and the warm-up of contenders that change one model in turn."""
    meter = BenchMeter(device)

    def get_ready(contender: Any, result: BenchResult) -> ReadyContender:
        step = step_of(contender)
        record = functools.partial(record_step, step, result)

        @contextlib.contextmanager
        def turn() -> Iterator[None]:
            if result.reserved_bytes is None:
                release(everything=False)  # otherwise the cache of other contenders would count
            with contender.applied(model):
                yield

        with turn():
            _, sample = meter.warm_up(step)
        record(sample)
        return ReadyContender(step, turn, record)

    return meter, get_ready


def prepare(case: ModelCase, device: torch.device) -> Prepared:
    release()
    model, batch = build(case, device), make_batch(case, device)
    # With a learning rate of 0 the optimizer does all its work, and every contender finds the same weights.
    kind: Any = OPTIMIZERS[case.optimizer]
    optimizer = None if kind is None else kind(model.parameters(), lr=0.0)
    if optimizer is not None:
        TrainingStep(model, optimizer, batch[:1, :8])()  # allocates its states before the first contender's step
    return share_model(model, device, lambda contender: TrainingStep(model, optimizer, batch, contender.call))


def tokens_per_second(result: BenchResult, case: ModelCase) -> float | None:
    return None if result.median_ms is None else 1e3 * case.tokens / result.median_ms


def rate(result: BenchResult, case: ModelCase) -> str:
    value = tokens_per_second(result, case)
    if value is None:
        return "out of memory" if result.status == "oom" else NONE
    return f"{value:.0f}"


def table(entry: Entry) -> Table:
    stock, other = (entry.by_name(name) for name in ("stock", "liger-loss"))
    columns: Columns = {
        "": lambda r: r.title,
        "tokens/s": lambda r: rate(r, entry.case),
        "median ms": lambda r: milliseconds(r.median_ms),
        "x stock": lambda r: ratio(stock.median_ms, r.median_ms),
        "x Liger": lambda r: ratio(other.median_ms, r.median_ms),
        "peak GiB": lambda r: gibibytes(r.peak_bytes),
        "step GiB": lambda r: gibibytes(r.workspace_bytes if r.peak_bytes is None else None),
        "reserved GiB": lambda r: gibibytes(r.reserved_bytes),
        "steps": lambda r: str(len(r.samples_ms)),
        "losses fused": lambda r: NONE if r.fused is None else f"{r.fused} of {r.forwards}",
        "passes sampled": lambda r: NONE if r.sampled is None else f"{r.sampled} of {r.sampled + (r.dense or 0)}",
        "loss": lambda r: NONE if r.loss is None else f"{r.loss:.5f}",
    }
    return table_of(entry, [result for result in entry.results if result.status != "unavailable"], columns)


def cell(entry: Entry, result: BenchResult) -> str:
    memory = "" if result.peak_bytes is None or not result.samples_ms else f", {gibibytes(result.peak_bytes)}"
    return rate(result, entry.case) + memory


MODEL = Benchmark(
    kind="model",
    about="Peak memory and tokens a second of the training step of whole models.",
    case_type=ModelCase,
    sizes="batch,sequence",
    presets=PRESETS,
    contenders=contenders_of,
    prepare=prepare,
    table=table,
    tables=overview("Tokens/s, peak GiB", "model, batch x sequence", cell, table),
    choices={"model": ARCHITECTURES, "optimizer": OPTIMIZERS, "weights": WEIGHTS},
    defaults=({"model": MODELS[0]},),
)
