"""A training that goes on after its ranks are killed, with others.

torchrun --nproc-per-node 3 --max-restarts 3 -m tests.elastic FOLDER

Every start loads FOLDER's last checkpoint, if there is one, takes a schedule for as
many workers as there are, and trains on. `python -m tests.elastic` tells the whole
story: of 3 ranks of fsdp one is killed in the middle of an epoch, and torchrun restarts
them; one is killed again, and 2 ranks of 1f1b go on. By deterministic=True the losses
have the bits of a training that was never stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fxsched import Schedule, schedules
from tests.ranks_save import EPOCH, Training
from tests.torchrun import ONE_THREAD, ROOT, launcher

STEPS = 3 * EPOCH - 1
MICROBATCHES = 6
SCHEDULES = {3: schedules.fsdp, 2: schedules.one_f_one_b, 1: schedules.gpipe}


def schedule_for(workers: int) -> Schedule:
    return SCHEDULES[workers](workers, MICROBATCHES)


def train(folder: Path, schedule: Schedule, kill_at: Sequence[int] = ()) -> list[str]:
    """All losses, to the bit; those before the last checkpoint come from there.

    kill_at: the steps in which the last rank kills itself, unless it has done so.
    """
    training = Training.of(schedule, 0, deterministic=True)
    last: dict[str, Any] = {"step": 0, "losses": []}
    if (folder / "latest").exists():
        last = training.load(folder)
    for step in range(last["step"], STEPS):
        last["losses"] += training.steps(1)
        if step in kill_at and os.environ.get("RANK") == str(schedule.workers - 1):
            kill_once(folder / f"killed-{step}")
        training.save_behind(folder, step=step + 1, losses=last["losses"])
    return last["losses"]


def kill_once(marker: Path) -> None:
    """Kills this process, the first time."""
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def ranks(folder: Path, count: int, *kill_at: int, restarts: int = 0) -> int:
    """Trains on ranks; torchrun's exit status."""
    *python, module = launcher(count)
    command = [*python, f"--max-restarts={restarts}", module, "tests.elastic"]
    arguments = [str(folder), "--kill-at", *map(str, kill_at)]
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, env=os.environ | ONE_THREAD
    ).returncode


def story(folder: Path) -> tuple[list[str], list[str]]:
    """Losses of a training that is never stopped, and of one that is killed twice."""
    wanted = train(folder / "whole", schedule_for(1))
    first, second = EPOCH // 2, EPOCH + EPOCH // 2
    assert ranks(folder, 3, first, second, restarts=1), "a killed rank ends torchrun"
    assert {first, second} == {int(p.name[7:]) for p in folder.glob("killed-*")}
    assert ranks(folder, 2) == 0
    return wanted, json.loads((folder / "losses-0").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--kill-at", type=int, nargs="*", default=[])
    options = parser.parse_args()
    if options.folder is None:
        with tempfile.TemporaryDirectory() as name:
            wanted, found = story(Path(name))
        assert found == wanted, (found, wanted)
        print(f"killed twice, resumed on 3 and 2 ranks: {len(found)} equal losses")
        return
    schedule = schedule_for(int(os.environ["WORLD_SIZE"]))
    losses = train(options.folder, schedule, options.kill_at)
    (options.folder / f"losses-{os.environ['RANK']}").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
