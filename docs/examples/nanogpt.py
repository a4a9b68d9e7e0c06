"""Trains a small GPT on the source of Python's standard library, then writes some code.

    python nanogpt.py                                      # workers are threads
    torchrun --nproc-per-node 2 nanogpt.py                 # each rank is a worker
    python nanogpt.py --schedule zb_h1 --workers 4 --steps 500

The model and the loop are plain PyTorch. The line with torch.compile is fxsched's.
"""

import argparse
import os

import torch
import torch.nn.functional as F
from torch import nn

import fxsched
from fxsched.models import sources

CONTEXT, WIDTH, HEADS, LAYERS = 64, 128, 4, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        rows, length, _ = x.shape
        qkv = self.qkv(self.before(x)).view(rows, length, 3, HEADS, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.feed(self.between(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = (
            nn.Embedding(256, WIDTH),
            nn.Embedding(CONTEXT, WIDTH),
        )
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def logits(self, tokens):
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.norm(self.blocks(x)) @ self.tokens.weight.T  # tied

    def forward(self, tokens, targets):
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten())


def written(model, prompt, count):
    """The prompt and count more bytes, drawn by their probabilities."""
    text = torch.tensor([list(prompt.encode())])
    with torch.no_grad():
        for _ in range(count):
            likely = F.softmax(model.logits(text[:, -CONTEXT:])[:, -1] / 0.7, -1)
            text = torch.cat([text, torch.multinomial(likely, 1)], 1)
    return bytes(text[0].tolist()).decode("utf-8", "replace")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    workers = int(os.environ.get("WORLD_SIZE", options.workers))  # torchrun sets it
    first = int(os.environ.get("RANK", 0)) == 0

    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    placed = {"schedule": options.schedule, "workers": workers}
    placed["microbatches"] = options.microbatches
    step = torch.compile(model, backend="fxsched", options=placed)

    text, draws = sources.load_text(), torch.Generator().manual_seed(0)
    held_out = sources.windows(text.held_out, 64, CONTEXT, draws)
    for number in range(options.steps + 1):
        if number % 50 == 0:
            with torch.no_grad():
                bits = step(*held_out).item() / 0.6931
            if first:
                print(f"step {number}: {bits:.2f} bits a byte on held-out text")
        loss = step(*sources.windows(text.train, 32, CONTEXT, draws))
        loss.backward()
        fxsched.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    state = fxsched.full_state_dict(model, rank=0)  # a rank alone has only its stages
    if first:
        whole = GPT()
        whole.load_state_dict(state)
        print(written(whole, "def __init__(self, ", 60))


if __name__ == "__main__":
    main()
