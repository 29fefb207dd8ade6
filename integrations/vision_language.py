"""A vision-language model with flce: `patch_model`, and nothing else changes.

    python integrations/vision_language.py

The model is a tiny Qwen2.5-VL that learns to read: each picture shows the first line of a piece of source code, and the
labels are the piece. The loss is computed on the labels of the text; those of the picture's tokens are ignored.

The script trains the same model stock and patched, and ends with status 1 if the losses differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from demo import Curve, compare, examples, excerpts, has_gpu, need
from flce.testing.models import VOCAB_SIZE

if TYPE_CHECKING:
    from PIL.Image import Image

# Behind those of the tokenizer.
PICTURE, PICTURE_BEGINS, PICTURE_ENDS = range(VOCAB_SIZE, VOCAB_SIZE + 3)
TOKENS = 48  # of a piece of text


def tiny_model(seed: int = 0) -> Any:
    """Two layers that see and two that read, in float32: with one seed the same model on every call."""
    # These take seconds to import: here, so that --help does not wait for them.
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(seed)
    config = Qwen2_5_VLConfig(
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
        },
        text_config={
            "vocab_size": PICTURE_ENDS + 1,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
            "use_cache": False,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        image_token_id=PICTURE,
        vision_start_token_id=PICTURE_BEGINS,
        vision_end_token_id=PICTURE_ENDS,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def picture(text: str) -> Image:
    """The first line of a text, in black on white."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (112, 56), "white")
    ImageDraw.Draw(image).text((4, 20), text.strip().partition("\n")[0][:20].encode("ascii", "replace"), fill="black")
    return image


def collate(rows: list[tuple[str, Any]]) -> dict[str, Any]:
    """Model inputs of texts and their tokens, each text behind its picture."""
    import torch
    from transformers import Qwen2VLImageProcessorPil

    pictures = Qwen2VLImageProcessorPil()([picture(text) for text, _ in rows], return_tensors="pt")
    texts = torch.stack([ids for _, ids in rows])
    patches = int(pictures["image_grid_thw"][0].prod()) // 4  # two by two patches make a token
    prompt = torch.tensor([PICTURE_BEGINS, *[PICTURE] * patches, PICTURE_ENDS]).expand(len(rows), -1)
    ids = torch.cat([prompt, texts], 1)
    return {
        "input_ids": ids,
        "labels": torch.cat([torch.full_like(prompt, -100), texts], 1),
        "mm_token_type_ids": (ids == PICTURE).int(),
        **pictures,
    }


def train(patched: bool, steps: int) -> Curve:
    import torch
    from torch.utils.data import DataLoader

    import flce

    device = "cuda" if has_gpu() else "cpu"
    model = tiny_model().train().to(device)
    if patched:
        flce.patch_model(model)  # all that is different
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    count = 4 * steps
    ids = [row["input_ids"] for row in examples(count, TOKENS)]
    data: Any = list(zip(excerpts(count, TOKENS), ids, strict=True))
    curve = Curve()
    for batch in DataLoader(data, batch_size=4, collate_fn=collate):
        loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
        curve.add(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return curve


def main(steps: Annotated[int, typer.Option(min=1)] = 50) -> None:
    """Train a tiny Qwen2.5-VL on pictures of text, stock and patched by flce, and compare the losses."""
    need("pillow")
    raise typer.Exit(compare("Qwen2.5-VL", lambda patched: train(patched, steps)))


if __name__ == "__main__":
    typer.run(main)
