"""Each command of the bench runs, in its smallest form."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from ..torchrun import ONE_THREAD, ROOT

SMALL = "--layers 2 --width 16 --length 8 --vocabulary 32 --batch 4 --microbatches 2"
SMALL_GPU = SMALL.replace("--layers 2", "--layers 4") + " --steps 1"
SMALLEST = {  # what it prints, and the rest of the command
    "auto": ("unet", "--models unet --workers 2 --split no --seconds 1"),
    "choose": ("| `1f1b` |", ""),
    "congestion": ("|   trainers |", "--trainers 2 --servers 1"),
    "contrastive": ("gradient caching", f"{SMALL} --steps 1 --only 1f1b"),
    "converge": ("stale_by_one", "--workers 2 --steps 2 --seeds 1"),
    "dag": (
        "B = 2 done",
        "--microbatches 2 --steps 1 --tries 1 --layers 1 1 1 "
        "--width 16 --length 8 --vocabulary 32",
    ),
    "first": (
        "aot_eager",
        "--rounds 1 --blocks 1 --width 16 --length 8 "
        "--vocabulary 32 --batch 8 --only lpp",
    ),
    "gpu": ("InterleavedZeroBubble", f"--device cpu {SMALL_GPU} --only zb_v"),
    "hosts": (
        "1f1b",
        "--rates 1000 --rounds 1 --only 1f1b torch-1f1b --forward 1",
    ),
    "lengths": (
        "collator",
        "--lengths 2 --most 40 --blocks 1 --width 16 --batch 4 --rounds 1",
    ),
    "limits": (
        "1f1b, 100%  ",  # in the table, as it isn't refused
        f"{SMALL} --steps 1 --shares 1 --schedules 1f1b --parked disk last",
    ),
    "memory": ("ddp done", f"{SMALL} --steps 1 --only ddp"),
    "norms": (
        "image alone",
        "--batch 4 --microbatches 2 --layers 1 --width 16 "
        "--length 8 --steps 1 --only 1f1b",
    ),
    "overhead": ("two stages a rank, torch", "--gloo --microbatches 4 --steps 1"),
    "peers": ("torch-1f1b", f"{SMALL} --steps 1 --tries 1 --only 1f1b"),
    "plan": ("order to check", "--workers 2 --microbatches 2 --programs one"),
    "predict": ("from a profile ms", f"{SMALL} --steps 1 --schedules 1f1b"),
    "save": ("background=True", "--rounds 1 --forward 1"),
    "search": ("zb_1p", "--rows 0 --effort 0.01"),
    "shards": ("torch-tp-whole", f"{SMALL} --steps 1 --only shards-whole"),
    "simulate": ("4 stages on as many workers", "--stages 4 --microbatches 4"),
    "stale": ("stale_by_one", "--workers 2"),
    "table": ("| DDP", f"{SMALL} --models nanogpt --steps 1 --tries 1"),
    "trunk": ("bubble_filled", "--workers 4 --microbatches 4 --effort 0.002"),
    "trunk_sleep": ("bubble_filled", "--count 4 --sleep 1 --steps 1"),
    "updates": ("torch-ddp", f"{SMALL} --steps 1 --tries 1 --only ddp"),
    "varying": ("each shape, static", "--count 4 --sleep 1 --batches 1 --steps 1"),
}
BY_TIMES = {"trunk_sleep"}  # exits with 1 if times are in another order than predicted


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
def test_a_command_of_the_bench_runs_in_its_smallest_form(name: str) -> None:
    printed, options = SMALLEST[name]
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", name, *options.split()],
        cwd=ROOT,
        env=os.environ | ONE_THREAD,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 or name in BY_TIMES, done.stderr
    assert printed in done.stdout


def test_without_gpus_a_line_says_what_the_bench_of_gpus_needs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", "gpu"],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.fullmatch(
        "gpu: --workers 2 needs .* has 0; --device cpu .*\n", done.stdout
    )


def test_commands_that_the_pages_name_are_among_these() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    named = set(re.findall(r"tests\.bench ([a-z_]+)", text))
    assert named and named <= {*SMALLEST}
