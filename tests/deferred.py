"""Models built in fxsched.deferred(), beside models built as ever.

python -m tests.deferred [--ranks N]: under many schedules, losses and the trained state
have the same bits; --ranks: over processes, each of which makes what it keeps alone.
python -m tests.deferred --zoo: models and inputs of tests.zoo have the same bits.
python -m tests.deferred --llama 70B --workers 64: plans a Llama on GPUs of hosts of 8,
with AdamW; fails if that takes 8 GiB. --shards N: in stages of N shards. --picture:
draws the step, too.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

import fxsched
from fxsched import Schedule, schedules
from fxsched.models.gpt import GPT, GPTConfig
from fxsched.params.record import note, record_of
from fxsched.transport.checksums import digest
from fxsched.transport.world import started_by_torchrun
from tests.torchrun import again_on_ranks

SCHEDULES = {
    "ddp": lambda w: schedules.ddp(w, 4),
    "fsdp": lambda w: schedules.fsdp(w, 4),
    "zero2": lambda w: schedules.zero2(w, 4),
    "gpipe": lambda w: schedules.gpipe(w, 4),
    "1f1b": lambda w: schedules.one_f_one_b(w, 4),
    "interleaved": lambda w: schedules.interleaved(w, 4, 2 * w),
    "zb_h1": lambda w: schedules.zb_h1(w, 4),
    "parameter_server": lambda w: schedules.parameter_server(w, 4),
}
CONFIG = GPTConfig(width=32, layers=4, heads=2, dropout=0.1)


def trained(schedule: Schedule, deferred: bool) -> tuple[list[str], int]:
    """Losses of three steps, to the bit, and a checksum of what they left."""
    torch.manual_seed(3)
    if deferred:
        with fxsched.deferred():
            model = GPT(CONFIG)
        count_made(model)
    else:
        model = GPT(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    with fxsched.backend(schedule) as backend:
        step = torch.compile(model, backend=backend)
        for _ in range(3):
            tokens = torch.randint(0, CONFIG.vocabulary, (8, 17))
            loss = step(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item().hex())
        return losses, digest(fxsched.full_state_dict(model))


MADE: list[str] = []  # names of what this process made


def count_made(model: nn.Module) -> None:
    """Notes what of a model is made here."""
    MADE.clear()
    for name, tensor in model.named_parameters():
        lazy = record_of(tensor).lazy
        if lazy is not None:

            def values(name: str = name, real: Any = lazy.values) -> Tensor:
                MADE.append(name)
                made: Tensor = real()
                return made

            note(tensor, lazy=lazy._replace(values=values))


def distinct(model: nn.Module, other: nn.Module) -> list[str]:
    """Names of what isn't the same in two models."""
    its = other.state_dict()
    return [n for n, v in model.state_dict().items() if not torch.equal(v, its[n])]


def compare() -> None:
    """All schedules, on this process's workers."""
    workers = int(os.environ.get("WORLD_SIZE", "2"))
    rank = os.environ.get("RANK", "0")
    for name, schedule in SCHEDULES.items():
        found = trained(schedule(workers), True)
        made = len(MADE)
        wanted = trained(schedule(workers), False)
        assert found == wanted, (name, found, wanted)
        print(f"{name}: rank {rank} made {made} weights; equal to the bit", flush=True)


def zoo() -> int:
    """Builds each model of the zoo twice; how many aren't the same."""
    from tests.zoo.cases import all_cases

    count, wrong = 0, []
    for name, case in all_cases().items():
        try:
            torch.manual_seed(case.seed)
            plain, inputs = case.make()
        except ImportError:
            continue
        after = torch.get_rng_state()
        torch.manual_seed(case.seed)
        with fxsched.deferred():
            model, others = case.make()
        alike = torch.equal(torch.get_rng_state(), after)
        fxsched.materialize(model)
        alike = alike and digest(tensors_of(plain)) == digest(tensors_of(model))
        alike = alike and digest(inputs) == digest(others)
        count += 1
        if not alike:
            wrong.append(name)
            print(f"{name}: differs", flush=True)
    print(f"{count} models, of which {len(wrong)} differ")
    return len(wrong)


def tensors_of(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


LLAMAS = {
    "7B": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    "70B": {
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}


def llama(name: str, workers: int, shards: int, picture: str | None) -> float:
    """Builds and plans a Llama with 1f1b, two microbatches a worker; GiB."""
    from transformers import LlamaConfig, LlamaForCausalLM

    start = time.perf_counter()
    config = LlamaConfig(**LLAMAS[name], max_position_embeddings=8192, use_cache=False)
    with fxsched.deferred(draws=False):
        model = Causal(LlamaForCausalLM(config))
    optimizer = torch.optim.AdamW(model.parameters())
    built = time.perf_counter()
    tokens = torch.zeros(2 * workers, 4096, dtype=torch.long)
    hosts = [list(range(k, min(k + 8, workers))) for k in range(0, workers, 8)]
    schedule = schedules.one_f_one_b(workers // shards, 2 * workers)
    plan = fxsched.plan(
        model,
        schedule if shards == 1 else schedules.sharded(schedule, shards),
        tokens,
        tokens,
        device="H100",
        network=fxsched.Network(
            hosts, fxsched.Rate(450e9, 5e-6), fxsched.Rate(50e9, 2e-5)
        ),
        optimizer=optimizer,
    )
    print(plan)
    busy = [0.0] * workers
    for event in plan.timeline:
        busy[event.worker] += event.end - event.start
    planned = time.perf_counter()
    if picture:
        plan.diagram().save(picture)
    count = sum(parameter.numel() for parameter in model.parameters())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    drawn = time.perf_counter() - planned
    busiest = max(busy) * workers / sum(busy)
    print(
        f"\n{count:,} parameters: built in {built - start:.1f} s, planned in "
        f"{planned - built:.1f} s, {f'drawn in {drawn:.1f} s, ' if picture else ''}"
        f"peak {peak:.2f} GiB; the busiest worker's jobs take {busiest:.3f} times as "
        "long as the mean worker's"
    )
    return peak


class Causal(nn.Module):
    """A causal language model of transformers, as one that returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=targets).loss
        return loss


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.deferred")
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--llama", choices=list(LLAMAS))
    parser.add_argument("--workers", type=int, default=8, help="of --llama (8)")
    parser.add_argument("--shards", type=int, default=1, help="of a stage (1)")
    parser.add_argument(
        "--picture", metavar="FILE", help="of --llama: an .svg or .html"
    )
    parser.add_argument("--zoo", action="store_true")
    given = parser.parse_args()
    if given.llama:
        if given.shards < 1 or given.workers % given.shards:
            parser.error(f"--shards {given.shards}: give a divisor of --workers")
        return int(llama(given.llama, given.workers, given.shards, given.picture) > 8)
    if given.zoo:
        return int(zoo() > 0)
    if given.ranks and not started_by_torchrun():
        return again_on_ranks(given.ranks, "tests.deferred")
    compare()
    return 0


if __name__ == "__main__":
    sys.exit(main())
