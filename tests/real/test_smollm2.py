"""SmolLM2 135M, stock and patched, in float32: training, generation, saving, and TRL's trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import flce
import real_models
from demo import Curve, max_difference, record_curve, trainer_settings, trl_installed

STEPS, TOKENS = 20, 128
PROMPT = "The capital of France is"


def batches(tokenizer: Any) -> torch.Tensor:
    """Return the tokens of code and of English text in turn, (steps, 1, tokens)."""
    halves = [
        real_models.token_ids(tokenizer, documents, STEPS // 2 * TOKENS).view(STEPS // 2, 1, TOKENS)
        for documents in real_models.texts().values()
    ]
    return torch.stack(halves, 1).view(STEPS, 1, TOKENS)


def generate(model: Any, tokenizer: Any) -> str:
    model.eval()
    ids = tokenizer(PROMPT, return_tensors="pt")
    text = tokenizer.decode(model.generate(**ids, max_new_tokens=8, do_sample=False)[0])
    model.train()
    return str(text)


def stock_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """Return the loss of the stock model's logits in float64: float32 sums of 49,152 exponentials are off by up to
    8e-6, which is 1e-3 of the gradients of some norms."""
    logits = model(input_ids=batch, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), batch[:, 1:].flatten())


def train(model: Any, ids: torch.Tensor) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train for a step on each batch. Return the losses and the gradients of the first step."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer, losses = torch.optim.AdamW(trained.values(), lr=1e-5, fused=True), []
    first: dict[str, torch.Tensor] = {}
    for batch in ids:
        is_patched = flce.is_patched(model)
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss if is_patched else stock_loss(model, batch)
        loss.backward()
        losses.append(loss.item())
        first = first or {name: parameter.grad.clone() for name, parameter in trained.items()}
        optimizer.step()
        optimizer.zero_grad()
    return losses, first


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "LoRA on the head"])
@pytest.mark.usefixtures("fail_on_materialize")
@pytest.mark.timeout(480)
def test_training(smollm2: Any, lora: bool, tmp_path: Path) -> None:
    load, tokenizer = smollm2
    ids, results, texts = batches(tokenizer), [], []
    for patched in (False, True):
        torch.manual_seed(0)
        model = load().train()
        if lora:
            from peft import LoraConfig, get_peft_model

            target_modules = ["q_proj", "v_proj", "lm_head"]
            model = get_peft_model(model, LoraConfig(target_modules=target_modules, lora_dropout=0.0, r=8))
            with torch.no_grad():  # adapters of zeros would give the other half a gradient of 0
                for name, parameter in model.named_parameters():
                    if "lora_B" in name:
                        parameter.normal_(std=1e-3)
        if patched:
            flce.patch_model(model)
        assert "Paris" in generate(model, tokenizer)
        results.append(train(model, ids))
        texts.append(generate(model, tokenizer))
        if patched:
            assert flce.report(model).fused == STEPS
    (stock_losses, stock), (losses, patched_gradients) = results
    assert losses == pytest.approx(stock_losses, rel=2e-4)
    assert losses[0] == pytest.approx(stock_losses[0], rel=1e-6)
    assert min(losses[-4:]) < max(losses[:4])
    assert stock.keys() == patched_gradients.keys()
    assert any("lm_head" in name or "embed_tokens" in name for name in stock)
    for name, gradient in patched_gradients.items():
        assert (gradient - stock[name]).norm() <= 2e-4 * stock[name].norm() + 1e-12, name
    assert texts[0] == texts[1]
    if not lora:
        model.save_pretrained(tmp_path)
        stored = type(model).from_pretrained(tmp_path).train()
        assert not flce.is_patched(stored)
        batch = ids[0]
        with torch.no_grad():
            trained, again = (float(m(input_ids=batch, labels=batch).loss) for m in (model, stored))
        assert again == pytest.approx(trained, rel=1e-5)


@pytest.mark.parametrize("by", ["sft", "dpo"])
@pytest.mark.timeout(480)
def test_trl(smollm2: Any, by: str) -> None:
    trl = pytest.importorskip("trl", reason="TRL needs Python 3.11")
    from datasets import Dataset

    load, tokenizer = smollm2
    texts = [text[2000:2400] for text in real_models.texts()["code"] if len(text) > 3000][:6]
    halves = {"prompt": [text[:200] for text in texts], "chosen": [text[200:] for text in texts]}
    pairs = {**halves, "rejected": halves["chosen"][1:] + halves["chosen"][:1]}

    def create(patched: bool, folder: str) -> Any:
        settings = {**trainer_settings(folder, 3), "max_length": 96, "per_device_train_batch_size": 1}
        settings["learning_rate"] = 1e-5
        if by == "dpo":
            arguments: dict[str, Any] = {"ref_model": load(), "args": trl.DPOConfig(**settings)}
            arguments["train_dataset"] = Dataset.from_dict(pairs)
        else:
            arguments = {"args": trl.SFTConfig(**settings), "train_dataset": Dataset.from_dict({"text": texts})}
        trainer = trl.DPOTrainer if by == "dpo" else trl.SFTTrainer
        return trainer(model=load(), processing_class=tokenizer, **arguments)

    def run(patched: bool) -> Curve:
        with trl_installed(patched):
            return record_curve(create, patched)

    stock, patched = run(False), run(True)
    assert len(patched.losses) == 3
    assert all(patched.fused)
    assert not any(stock.fused)
    assert max_difference(stock, patched) < 1e-4
