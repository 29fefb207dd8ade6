"""Fine-tune a causal language model on a text, or only LoRA adapters of it.

On a GPU matrix products are in bfloat16. Weights that are trained are float32, because updates are smaller than the
rounding of bfloat16.
"""

import argparse
import importlib.util
import random
import sys
import time
from datetime import timedelta
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", help="folder with a model and its tokenizer, or a hub id")
parser.add_argument("text", type=Path, help="text file")
parser.add_argument("folder", nargs="?", help="for the trained model or the adapters, and the tokenizer (MODEL-tuned)")
parser.add_argument("--lora", type=int, metavar="RANK", help="train only LoRA adapters of this rank (16, say), by PEFT")
parser.add_argument("--lora-targets", metavar="LAYERS", help="all-linear, or q_proj,v_proj, say (PEFT's of the model)")
parser.add_argument("--load-in-4bit", action="store_true", help="linear layers but the head in 4 bits, by bitsandbytes")
parser.add_argument("--seq-len", type=int, default=1024, metavar="TOKENS", help="tokens of a sequence (1024)")
arguments = parser.parse_args()
target = arguments.folder or f"{Path(arguments.model).name}-tuned"
if not arguments.text.is_file():
    sys.exit(f"{arguments.text} does not exist: give a text file")
if (arguments.load_in_4bit or arguments.lora_targets) and arguments.lora is None:
    sys.exit("--load-in-4bit and --lora-targets need --lora: give a rank, such as 16")
packages = ["peft"] * (arguments.lora is not None) + ["accelerate", "bitsandbytes"] * arguments.load_in_4bit
if missing := [package for package in packages if importlib.util.find_spec(package) is None]:
    sys.exit(f"{' and '.join(missing)} must be installed: pip install {' '.join(missing)}")

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig  # noqa: E402

import flce  # noqa: E402

device = "cuda" if torch.cuda.is_available() else "cpu"
settings = {"dtype": torch.float32 if arguments.lora is None else "auto"}
if arguments.load_in_4bit:
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    settings |= {"quantization_config": quantization, "device_map": {"": device}}
try:
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, **settings)
except (ImportError, OSError, RuntimeError, ValueError) as error:
    sys.exit(f"{arguments.model} cannot be loaded: {' '.join(str(error).split())}")
model = model.train() if arguments.load_in_4bit else model.to(device).train()
# Transformers 5.23 has renamed this method.
enable_checkpointing = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
enable_checkpointing({"use_reentrant": False})
if arguments.lora is not None:
    from peft import LoraConfig, get_peft_model

    names = arguments.lora_targets
    layers = names.split(",") if names and names != "all-linear" else names
    try:
        model = get_peft_model(model, LoraConfig(r=arguments.lora, target_modules=layers, task_type="CAUSAL_LM"))
    except ValueError as error:
        sys.exit(f"--lora-targets: give all-linear, or names of layers: {error}")
flce.patch_model(model)

tokens = tokenizer(arguments.text.read_text(encoding="utf-8"), return_tensors="pt").input_ids
sequences = [ids for ids in tokens.split(arguments.seq_len, dim=1) if ids.shape[1] > 1]  # one token predicts nothing
if not sequences:
    sys.exit(f"{arguments.text} has fewer than two tokens: give a longer text")
random.Random(0).shuffle(sequences)
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=2e-5 if arguments.lora is None else 2e-4)
autocast = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
start = time.monotonic()
for step, sequence in enumerate(sequences, 1):
    ids = sequence.to(device)
    with autocast:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    left = timedelta(seconds=round((time.monotonic() - start) / step * (len(sequences) - step)))
    print(f"step {step} of {len(sequences)}: loss {loss.item():.3f}, {left} left", flush=True)

print(flce.report(model))
model.save_pretrained(target)
tokenizer.save_pretrained(target)
print(f"saved {target}")
