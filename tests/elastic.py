"""A training that goes on after its ranks are killed, with others.

torchrun --nproc-per-node 4 --max-restarts 3 -m tests.elastic FOLDER

Every start loads FOLDER's last checkpoint, if there is one, takes a schedule for as
many workers as there are, and trains on. `python -m tests.elastic` tells the whole
story: 4 ranks of fsdp, one of which is killed; 2 of 1f1b, one of which is killed and
which torchrun restarts; then one process. By deterministic=True its losses have the
bits of a training that was never stopped. tests/checkpoint/test_save.py tells it in
short.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from fxsched import Schedule, schedules
from tests.ranks_save import Training
from tests.torchrun import ONE_THREAD, ROOT, launcher

STEPS = 8
MICROBATCHES = 4
SCHEDULES = {4: schedules.fsdp, 2: schedules.one_f_one_b, 1: schedules.gpipe}


def schedule_for(workers: int) -> Schedule:
    return SCHEDULES[workers](workers, MICROBATCHES)


def train(folder: Path, schedule: Schedule, kill_at: int | None = None) -> list[str]:
    """All losses, to the bit; those before the last checkpoint come from there.

    kill_at: the step in which the last rank kills itself, unless it has done so.
    """
    training = Training.of(schedule, 0, deterministic=True)
    last: dict[str, Any] = {"step": 0, "losses": []}
    if (folder / "latest").exists():
        last = training.load(folder)
    for step in range(last["step"], STEPS):
        last["losses"] += training.steps(1)
        if step == kill_at and os.environ.get("RANK") == str(schedule.workers - 1):
            kill_once(folder / f"killed-{step}")
        training.save_behind(folder, step=step + 1, losses=last["losses"])
    return last["losses"]


def kill_once(marker: Path) -> None:
    """Kills this process, the first time."""
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def ranks(folder: Path, count: int, kill_at: int, restarts: int = 0) -> int:
    """Trains on ranks; torchrun's exit status."""
    *python, module = launcher(count)
    command = [*python, f"--max-restarts={restarts}", module, "tests.elastic"]
    arguments = [str(folder), "--kill-at", str(kill_at)]
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, env=os.environ | ONE_THREAD
    ).returncode


def story() -> None:
    """Kills and resumes, and compares."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wanted = train(folder / "whole", schedule_for(1))
        assert ranks(folder, 4, kill_at=2), "a killed rank ends torchrun"
        assert ranks(folder, 2, kill_at=5, restarts=1) == 0
        found = train(folder, schedule_for(1))
        assert found == wanted, (found, wanted)
    print(
        f"killed twice, resumed on 2 ranks and in 1 process: {len(found)} equal losses"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--kill-at", type=int)
    options = parser.parse_args()
    if options.folder is None:
        story()
        return
    schedule = schedule_for(int(os.environ["WORLD_SIZE"]))
    losses = train(options.folder, schedule, options.kill_at)
    (options.folder / f"losses-{os.environ['RANK']}").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
