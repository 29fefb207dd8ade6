"""Fine-tune a causal language model on a text: python finetune.py MODEL TEXT [FOLDER]

MODEL is a folder with a model and its tokenizer, or a hub id. TEXT is a text file. FOLDER (default: MODEL-tuned, in the
current folder) gets the trained model and its tokenizer.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import flce

SEQUENCE_LENGTH = 1024

if {"-h", "--help"} & {*sys.argv}:
    print(__doc__)
    sys.exit()
if len(sys.argv) not in (3, 4):
    sys.exit(__doc__)
source, text, *folder = sys.argv[1:]
target = folder[0] if folder else f"{Path(source).name}-tuned"
device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(source)
model = AutoModelForCausalLM.from_pretrained(source).to(device).train()
model.gradient_checkpointing_enable()
flce.patch_model(model)

tokens = tokenizer(Path(text).read_text(), return_tensors="pt").input_ids.to(device)
sequences = [ids for ids in tokens.split(SEQUENCE_LENGTH, dim=1) if ids.shape[1] > 1]  # one token predicts nothing
if not sequences:
    sys.exit(f"{text} has fewer than two tokens: give a longer text")
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
for step, ids in enumerate(sequences, 1):
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} of {len(sequences)}: loss {loss.item():.3f}")

print(flce.report(model))
model.save_pretrained(target)
tokenizer.save_pretrained(target)
print(f"saved {target}")
