"""The script of docs/several_machines.md on threads and on two machines of two ranks,
whose losses must be equal: python -m tests.several_machines.

The machines are network namespaces that a pair of veth devices joins; where namespaces
aren't allowed, two torchrun agents on loopback.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.forked_ranks import shell
from tests.kill_saves import free_port
from tests.torchrun import ROOT

PAGE = ROOT / "docs" / "several_machines.md"
INSIDE = "FXSCHED_TEST_NAMESPACES"
SECONDS = 200


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
    process = subprocess.Popen(["unshare", "--net", "sleep", str(2 * SECONDS)])
    there = f"/proc/{process.pid}/ns/net"
    enter = ["nsenter", f"--net={there}"]
    try:
        while os.readlink(there) == os.readlink("/proc/self/ns/net"):
            time.sleep(0.01)
        peer = ("peer", "name", "eth0", "netns", str(process.pid))
        shell("ip", "link", "add", "eth0", "type", "veth", *peer)
        for number, at in enumerate(([], enter)):
            shell(*at, "ip", "link", "set", "lo", "up")
            address = f"10.9.0.{number + 1}/24"
            shell(*at, "ip", "addr", "add", address, "dev", "eth0")
            shell(*at, "ip", "link", "set", "eth0", "up")
        yield enter
    finally:
        process.kill()
        process.wait()


def run(folder: str, commands: list[list[str]], device: str) -> list[str]:
    """What the script prints by commands that run at the same time."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": device,
    }
    running = [
        subprocess.Popen(
            [*command, "train.py"],
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
    return re.findall(r"loss (\S+)", printed)


def agents(address: str) -> list[list[str]]:
    """torchrun on two machines, the first of which has this address."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    where = ["--nnodes", "2", "--master-addr", address]
    port = ["--master-port", str(free_port())]
    return [[*torchrun, *where, *port, "--node-rank", str(number)] for number in (0, 1)]


def main() -> int:
    """1 if the losses differ."""
    if INSIDE not in os.environ:
        return enter()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(script())
        threads = run(folder, [[sys.executable]], "lo")
        if os.environ[INSIDE]:
            where = "in two network namespaces"
            with second_machine() as there:
                first, second = agents("10.9.0.1")
                ranks = run(folder, [first, [*there, *second]], "eth0")
        else:
            where = "of two agents on loopback, for namespaces aren't allowed"
            ranks = run(folder, agents("127.0.0.1"), "lo")
    print(f"threads: losses {' '.join(threads)}")
    print(f"2 x 2 ranks {where}: losses {' '.join(ranks)}")
    return int(not threads or threads != ranks)


def enter() -> int:
    """This command once more, in namespaces of its own, if they are allowed."""
    own = ["unshare", "--map-root-user", "--net"]
    allowed = subprocess.run([*own, "true"], capture_output=True).returncode == 0
    command = [*own * allowed, sys.executable, "-m", "tests.several_machines"]
    environment = os.environ | {INSIDE: "1" if allowed else ""}
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
