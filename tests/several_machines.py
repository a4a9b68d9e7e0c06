"""The script of docs/several_machines.md on threads and on two machines of two ranks,
whose losses must be equal, and the network between them as fxsched measures it, limited
to MEGABITS: python -m tests.several_machines.

The machines are network namespaces that a pair of veth devices joins; where namespaces
aren't allowed, two torchrun agents on loopback.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fxsched
from tests.forked_ranks import shell
from tests.kill_saves import free_port
from tests.namespaces import enter, host, limit
from tests.torchrun import ROOT

PAGE = ROOT / "docs" / "several_machines.md"
INSIDE = "FXSCHED_TEST_NAMESPACES"
SECONDS = 200
MEGABITS = 200


def script() -> str:
    """The page's."""
    found = re.search(
        r"^```python\n(# train.py\n.*?)^```$", PAGE.read_text(), re.M | re.S
    )
    assert found is not None
    return found[1]


@contextmanager
def second_machine() -> Iterator[list[str]]:
    """A network namespace beside this process's; what a command there begins with."""
    with host("eth0", "10.9.0.2") as there:
        shell("ip", "link", "set", "lo", "up")
        shell("ip", "addr", "add", "10.9.0.1/24", "dev", "eth0")
        yield enter(there)


def run(folder: str, commands: list[list[str]], device: str) -> str:
    """What commands print that run at the same time."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": device,
    }
    running = [
        subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    try:
        printed = "".join(each.communicate(timeout=SECONDS)[0] for each in running)
    finally:
        for each in running:
            each.kill()
    failed = [each.args for each in running if each.returncode]
    assert not failed, failed
    return printed


def losses(printed: str) -> list[str]:
    """Of all steps of the script."""
    return re.findall(r"loss (\S+)", printed)


def agents(address: str, *script: str) -> list[list[str]]:
    """torchrun on two machines, the first of which has this address."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    where = ["--nnodes", "2", "--master-addr", address]
    port = ["--master-port", str(free_port())]
    both = (["--node-rank", str(number), *script] for number in (0, 1))
    return [[*torchrun, *where, *port, *each] for each in both]


def measured(folder: str, commands: list[list[str]], device: str) -> fxsched.Network:
    """The network between the machines of these agents."""
    print(run(folder, commands, device))
    return fxsched.Network.load(Path(folder, "net.json"))


def main() -> int:
    """1 if the losses differ, or the network isn't as it was made."""
    if INSIDE not in os.environ:
        return in_namespaces()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(script())
        threads = losses(run(folder, [[sys.executable, "train.py"]], "lo"))
        measure = ("-m", "fxsched", "network", "net.json")
        if os.environ[INSIDE]:
            where = "in two network namespaces"
            with second_machine() as there:
                first, second = agents("10.9.0.1", "train.py")
                ranks = losses(run(folder, [first, [*there, *second]], "eth0"))
                for at in ([], there):
                    limit(at, "eth0", MEGABITS)
                first, second = agents("10.9.0.1", *measure)
                network = measured(folder, [first, [*there, *second]], "eth0")
        else:
            where = "of two agents on loopback, for namespaces aren't allowed"
            ranks = losses(run(folder, agents("127.0.0.1", "train.py"), "lo"))
            network = measured(folder, agents("127.0.0.1", *measure), "lo")
    print(f"threads: losses {' '.join(threads)}")
    print(f"2 x 2 ranks {where}: losses {' '.join(ranks)}")
    share = network.between.bandwidth / (MEGABITS * 1e6 / 8)
    limited = bool(os.environ[INSIDE])
    if limited:
        print(f"between hosts: {share:.3f} of {MEGABITS} Mbit/s")
    hosts = network.hosts == (((0, 1), (2, 3)) if limited else ((0, 1, 2, 3),))
    as_limited = not limited or 0.5 < share < 1.05  # less on a busy machine
    return int(not threads or threads != ranks or not hosts or not as_limited)


def in_namespaces() -> int:
    """This command once more, in namespaces of its own, if they are allowed."""
    own = ["unshare", "--map-root-user", "--net"]
    allowed = subprocess.run([*own, "true"], capture_output=True).returncode == 0
    command = [*own * allowed, sys.executable, "-m", "tests.several_machines"]
    environment = os.environ | {INSIDE: "1" if allowed else ""}
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
