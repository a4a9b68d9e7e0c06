"""Tests on other versions of PyTorch: python -m tests.versions [2.11.0 ...] [-- ...].

Makes an environment of its own for each version, in --folder, where it stays for the
next time; installs fxsched's requirements, runs pytest there with the arguments after
--, and prints a table. Without versions: the last of each release that
pyproject.toml allows. Ends with 1 if a test failed anywhere.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
import tomllib
import venv
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

ROOT = Path(__file__).parents[1]
VERSIONS = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
OURS = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}


class Outcome(NamedTuple):
    """A line of the table: what pytest's last line says, and its exit code."""

    version: str
    summary: str
    code: int
    seconds: float


def requirements() -> list[str]:
    """What fxsched and its tests need, but for torch itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = project["dependencies"] + project["optional-dependencies"]["test"]
    return [each for each in named if not re.match(r"torch\b", each)]


def environment(version: str, folder: Path) -> Path:
    """The Python of an environment with this version of torch, made if need be."""
    home = folder / f"t{version}"
    python = home / "bin" / "python"
    if not (home / "ready").exists():
        venv.create(home, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, f"torch=={version}", *requirements()], check=True)
        (home / "ready").touch()
    return python


def run(version: str, folder: Path, arguments: list[str]) -> Outcome:
    """Installs a version and runs pytest on it; what it prints comes out at once."""
    start = time.perf_counter()
    try:
        python = environment(version, folder)
    except subprocess.CalledProcessError as error:
        return Outcome(version, "could not be installed", error.returncode, 0.0)
    command = [str(python), "-m", "pytest", "-q", *arguments]
    last = ""
    with subprocess.Popen(
        command, cwd=ROOT, env=os.environ | OURS, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"{version} {line}", end="", flush=True)
            last = line.strip() or last
    return Outcome(
        version, last.strip("= "), process.returncode, time.perf_counter() - start
    )


def main() -> int:
    """Runs the versions one after the other; 1 if any failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.versions", description=__doc__
    )
    parser.add_argument("versions", nargs="*", help="such as 2.11.0")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache/fxsched")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:split])
    arguments = sys.argv[split + 1 :]
    done = [
        run(version, options.folder, arguments)
        for version in options.versions or VERSIONS
    ]
    rows = [
        (o.version, o.code or "passed", o.summary, f"{o.seconds:.0f}") for o in done
    ]
    print(tabulate(rows, ["torch", "", "pytest", "s"], disable_numparse=True))
    return int(any(outcome.code for outcome in done))


if __name__ == "__main__":
    sys.exit(main())
