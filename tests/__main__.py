"""All checks: `python -m tests` runs ruff, mypy --strict and pytest.

Without arguments it leaves out what left_out.txt lists and takes 15 to 30 minutes; with
`--all` it takes 45. Other arguments go on to pytest: `python -m tests --quick` leaves
the slow tests out and takes 3 to 7 minutes, `python -m tests tests/draw -k svg` runs a
part. Process groups stay on loopback, and every process keeps to one thread, for the
tests run side by side.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CHECKS = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("mypy", "fxsched"),
    ("pytest", "-q", "-n", "2", "--dist", "loadfile"),
)


def main() -> int:
    """Runs every check from the project's folder; 1 if any failed."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(f"usage: python -m tests [argument of pytest ...]\n\n{__doc__}")
        return 0
    root = Path(__file__).parents[1]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | os.environ
    given = [each for each in sys.argv[1:] or ["--short"] if each != "--all"]
    running = []
    for module, *arguments in CHECKS:
        print(f"== {module} {' '.join(arguments)}", flush=True)
        more = given if module == "pytest" else []
        command = [sys.executable, "-m", module, *arguments, *more]
        running.append((module, subprocess.Popen(command, cwd=root, env=environment)))
        if module != "mypy":  # on one core, beside the tests
            running[-1][1].wait()
    failed = [module for module, check in running if check.wait()]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
