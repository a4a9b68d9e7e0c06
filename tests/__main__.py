"""All checks: `python -m tests` runs ruff, mypy --strict and pytest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHECKS = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("mypy", "fxsched"),
    ("pytest", "-q", "-n", "2"),
)


def main() -> int:
    """Runs every check from the project's folder; 1 if any failed."""
    root = Path(__file__).parents[1]
    failed = []
    for module, *arguments in CHECKS:
        print(f"== {module} {' '.join(arguments)}", flush=True)
        command = [sys.executable, "-m", module, *arguments, *sys.argv[1:]]
        if module != "pytest":
            command = [sys.executable, "-m", module, *arguments]
        if subprocess.run(command, cwd=root).returncode:
            failed.append(module)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
