"""Faults in random plans over 2 to 4 ranks: python -m tests.inject_plans --plans 100.

Each plan is of a seed (tests/random_plans.py), with one fault (tests/faults.py): an
exception in a job F, B or W, a transfer, the optimizer or a pass; a rank that is slow,
but less than the timeout, or more; a full disk during a save; a rank that is killed,
stopped, or cut off by its network interface going down. All others must end in time
with an error that names it; all steps that end must equal eager's; what ends no process
is followed by backend.reset() and steps that equal eager again; and no thread,
descriptor, process or shared memory may stay.

Cut links and full disks need network and mount namespaces (unshare -rmn); where these
aren't allowed they are left out, and a line says so.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.faults import ROUNDS, TIMEOUT, Trial
from tests.forked_ranks import Rank, Report, Store, shell

SLACK = 6.0  # seconds that a busy machine may take longer
START = 180.0  # seconds for a round's other trials
LEFT_OUT = "namespaces aren't allowed: cut links and full disks are left out"
INSIDE = "FXSCHED_TEST_NAMESPACES"


def wait(ranks: Sequence[Rank], what: str, seed: int, seconds: float) -> None:
    """Until all ranks have said something of a trial, or have ended, or too long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if all(rank.said(what, seed) or not rank.running() for rank in ranks):
            return
        time.sleep(0.02)


def has_said(rank: Rank, what: str) -> bool:
    return any(report["what"] == what for report in rank.read())


def strike(trial: Trial, ranks: Sequence[Rank]) -> None:
    """Kills, stops or cuts off the victim, in the middle of its steps."""
    time.sleep(random.Random(trial.seed).random() / 4)
    if trial.fault == "cut":
        shell("ip", "link", "set", f"rank{trial.victim}", "down")
    else:
        number = signal.SIGKILL if trial.fault == "kill" else signal.SIGSTOP
        os.kill(ranks[trial.victim].process, number)


def run_round(trials: Sequence[Trial], store: Store, folder: Path) -> list[str]:
    """What is wrong with a round, one line each."""
    shared, last = set(os.listdir("/dev/shm")), trials[-1]
    ranks = [Rank(rank, trials, store, folder) for rank in range(trials[0].ranks)]
    try:
        if last.fault not in ("kill", "stop", "cut"):
            wait(ranks, "done", last.seed, START)
            return list(verdict(trials, ranks, 0.0))
        wait(ranks, "ready", last.seed, START)
        if not all(has_said(rank, "ready") for rank in ranks):
            return list(verdict(trials, ranks, 0.0))
        struck = time.time()
        strike(last, ranks)
        others = [rank for rank in ranks if rank.number != last.victim]
        ending = ranks if last.fault == "cut" else others
        wait(ending, "done", last.seed, TIMEOUT + 3 * SLACK)
        return list(verdict(trials, ranks, struck))
    finally:
        for rank in ranks:
            rank.end()
        stays = set(os.listdir("/dev/shm")) - shared
        stays = {name for name in stays if not name.startswith("sem.mp-")}  # others'
        if stays:
            raise AssertionError(f"shared memory stays: {sorted(stays)}")


def verdict(
    trials: Sequence[Trial], ranks: Sequence[Rank], struck: float
) -> Iterator[str]:
    """What ranks did not say of trials, or should not have."""
    for rank in ranks:
        for report in rank.read():
            if report["what"] == "wrong":
                yield f"rank {rank.number}: {report['error']}"
    for trial in trials:
        for rank in ranks:
            ends = trial.fault not in ("kill", "stop") or rank.number != trial.victim
            if ends and not rank.said("done", trial.seed):
                yield f"{trial}: rank {rank.number} did not end"
            for report in rank.said("failed", trial.seed):
                why = unnamed(trial, report, struck)
                if why:
                    yield f"{trial}: rank {rank.number} {why}: {report['error']}"


def unnamed(trial: Trial, report: Report, struck: float) -> str | None:
    """What is wrong with an error, if anything."""
    text, victim = report["error"], trial.victim
    if report["what"] == "wrong":
        return None
    if trial.fault == "slow":
        return text and "failed for a rank that is slow"
    if text is None:  # nobody waited for it: all steps were eager's
        return None
    if trial.fault in ("kill", "stop", "cut"):
        late = report["seconds"] - struck > TIMEOUT + SLACK
        if late:
            return f"failed after {report['seconds'] - struck:.1f} s"
    names = {
        "kill": (f"lost rank {victim} at call",),
        "late": (f"rank {victim} waits for nobody", "Planted"),
    }.get(trial.fault, ("planted",))
    silent = f"rank {victim} waits for nobody"
    if trial.fault in ("kill", "stop", "cut", "late"):
        cut_off = trial.fault == "cut" and report["rank"] == victim
        store = "the store of the process group has not answered"
        named = any(n in text for n in (*names, silent)) or (cut_off and store in text)
    else:
        own = report["rank"] == victim and "planted" in text
        named = own or (f"rank {victim} " in text and "planted" in text)
    return None if named else "blames another"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.inject_plans")
    parser.add_argument("--plans", type=int, default=100, help="(100)")
    parser.add_argument("--first", type=int, default=0, help="seed (0)")
    options = parser.parse_args()
    if INSIDE not in os.environ:
        return enter()
    return faults(range(options.first, options.first + options.plans))


def enter() -> int:
    """This command once more, in namespaces of its own, if they are allowed."""
    own = ["unshare", "--map-root-user", "--mount", "--net"]
    allowed = subprocess.run([*own, "true"], capture_output=True).returncode == 0
    command = [sys.executable, "-m", "tests.inject_plans", *sys.argv[1:]]
    environment = os.environ | {INSIDE: "1" if allowed else ""}
    if not allowed:
        print(LEFT_OUT)
    return subprocess.run([*own * allowed, *command], env=environment).returncode


@contextmanager
def small_disk(inside: bool) -> Iterator[Path]:
    """A folder; inside of namespaces, a file system of 1 MiB."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as mounted:
        if inside:
            shell("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder)
            mounted.callback(shell, "umount", folder)
        yield Path(folder)


def faults(seeds: range) -> int:
    """Runs trials by rounds; 1 if anything was wrong."""
    inside = bool(os.environ[INSIDE])
    trials = [Trial.drawn(seed) for seed in seeds]
    if inside:
        shell("ip", "link", "set", "lo", "up")
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    else:
        trials = [each for each in trials if each.fault not in ("cut", "disk")]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    rounds: dict[tuple[int, int], list[Trial]] = {}
    for trial in trials:
        kinds = next(i for i, kinds in enumerate(ROUNDS) if trial.fault in kinds)
        rounds.setdefault((trial.seed // sum(map(len, ROUNDS)), kinds), []).append(
            trial
        )
    store, failed, began = Store(), 0, time.monotonic()
    try:
        for one in rounds.values():
            with small_disk(inside) as folder:
                wrong = run_round(one, store, folder)
            failed += bool(wrong)
            said = ", ".join(f"{t.fault} on {t.victim}" for t in one)
            print(f"seed {one[0].seed}, {one[0].ranks} ranks: {said}", flush=True)
            for line in wrong:
                print(f"  {line}", flush=True)
    finally:
        store.end()
    seconds = time.monotonic() - began
    print(f"{len(trials)} plans in {seconds:.0f} s: {failed} rounds were wrong")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
