"""Trains CLIP, a ResNet-18 and a text encoder, on pictures of functions and docstrings.

    python clip.py                                         # workers are threads
    torchrun --nproc-per-node 2 clip.py                    # each rank is a worker
    python clip.py --schedule ddp --steps 300

CLIP's loss compares all rows of a batch, and BatchNorm averages over all rows. fxsched
computes both on the whole batch, so losses are those of eager PyTorch.
"""

import argparse
import os

import torch
import torch.nn.functional as F
from torch import nn
from transformers import ResNetConfig, ResNetModel

import fxsched
from fxsched.models import docstrings, pages

WIDTH, WORDS, BATCH = 128, 4096, 32


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True)
            for _ in range(2)
        )

    def forward(self, tokens):
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return x.mean(1)


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        resnet18 = ResNetConfig(
            num_channels=1,
            embedding_size=16,
            hidden_sizes=[16, 32, 64, WIDTH],
            depths=[2, 2, 2, 2],
            layer_type="basic",
        )
        self.image, self.text = ResNetModel(resnet18), Text()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def similarities(self, image, text):
        """[rows of text, rows of images]"""
        image = F.normalize(self.image(image).pooler_output.flatten(1), dim=-1)
        text = F.normalize(self.text(text), dim=-1)
        return self.scale.exp() * text @ image.T

    def forward(self, image, text):
        logits, own = self.similarities(image, text), torch.arange(len(image))
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    workers = int(os.environ.get("WORLD_SIZE", options.workers))  # torchrun sets it
    first = int(os.environ.get("RANK", 0)) == 0

    torch.manual_seed(0)
    model = Clip()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    placed = {"schedule": options.schedule, "workers": workers}
    placed["microbatches"] = options.microbatches
    step = torch.compile(model, backend="fxsched", options=placed)

    functions = docstrings.library(docstrings.CODE_LENGTH, docstrings.DOC_LENGTH)
    words = docstrings.vocabulary_of(functions.train, WORDS)
    train, held_out = (pages.pages(part[:2000], words) for part in functions)
    draws = torch.Generator().manual_seed(0)
    for number in range(options.steps):
        rows = torch.randperm(len(train.text), generator=draws)[:BATCH]
        loss = step(train.image[rows], train.text[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if first and number % 20 == 0:
            print(f"step {number}: loss {loss.item():.3f}")

    state = fxsched.full_state_dict(model, rank=0)  # a rank alone has only its stages
    if first:
        whole = Clip().eval()
        whole.load_state_dict(state)
        with torch.no_grad():
            found = whole.similarities(held_out.image[:BATCH], held_out.text[:BATCH])
        right = (found.argmax(1) == torch.arange(BATCH)).sum().item()
        print(f"{right} of {BATCH} held-out docstrings find their function's picture")


if __name__ == "__main__":
    main()
