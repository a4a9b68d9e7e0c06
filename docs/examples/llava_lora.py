"""Fine-tunes a model like LLaVA with LoRA: it reads a picture and writes a sentence.

    python llava_lora.py                                   # workers are threads
    torchrun --nproc-per-node 2 llava_lora.py              # each rank is a worker

The model has the layers of LLaVA, is small, and starts from random weights, so that
nothing is downloaded. For a real one load it by LlavaForConditionalGeneration's
from_pretrained. The image encoder is frozen, the projector is trained, and LoRA trains
the language model. Afterwards the adapter is saved as PEFT saves it.
"""

import argparse
import os

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

import fxsched
from fxsched.models import docstrings, pages

IMAGE, LENGTH, BATCH = 256, 32, 16  # the token of an image; bytes are 0..255


def llava():
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4)
    vision = CLIPVisionConfig(
        num_attention_heads=4,
        image_size=64,
        patch_size=8,
        num_channels=1,
        projection_dim=64,
        **sizes,
    )
    text = LlamaConfig(
        vocab_size=257,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        **sizes,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE,
        image_seq_length=64,
    )
    model = LlavaForConditionalGeneration(config)
    low_rank = LoraConfig(
        r=8,
        target_modules=r".*language_model.*\.(q_proj|v_proj|up_proj|down_proj)",
        modules_to_save=["multi_modal_projector", "lm_head"],
    )
    return get_peft_model(model, low_rank)  # what is not named here is frozen


def example(image, sentence):
    """Pictures [rows, 1, 32, 64] and their sentences as the model's inputs."""
    ids = torch.cat([torch.full((len(image), 64), IMAGE), sentence], 1)
    return {
        "pixel_values": torch.cat([image, torch.zeros_like(image)], 2),  # a square
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids.masked_fill((ids == IMAGE) | (ids == 0), -100),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", default="fsdp")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save", default="adapter", help="folder of the adapter")
    options = parser.parse_args()
    workers = int(os.environ.get("WORLD_SIZE", options.workers))  # torchrun sets it
    first = int(os.environ.get("RANK", 0)) == 0

    model = llava()
    if first:
        model.print_trainable_parameters()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    placed = {"schedule": options.schedule, "workers": workers}
    placed["microbatches"] = options.microbatches
    step = torch.compile(model, backend="fxsched", options=placed)

    functions = docstrings.library(docstrings.CODE_LENGTH, docstrings.DOC_LENGTH).train
    image = pages.pictures([each.source for each in functions[:500]])
    text = [each.doc.strip().encode()[:LENGTH] for each in functions[:500]]
    sentence = torch.tensor([list(each.ljust(LENGTH, b"\0")) for each in text])
    draws = torch.Generator().manual_seed(0)
    for number in range(options.steps):
        rows = torch.randint(len(image), (BATCH,), generator=draws)
        loss = step(**example(image[rows], sentence[rows])).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if first and number % 10 == 0:
            print(f"step {number}: loss {loss.item():.3f}")

    state = fxsched.full_state_dict(model, rank=0)  # a rank alone has only its stages
    if first:
        whole = llava()
        whole.load_state_dict(state)
        whole.save_pretrained(options.save)
        print(f"saved {sorted(os.listdir(options.save))}")


if __name__ == "__main__":
    main()
