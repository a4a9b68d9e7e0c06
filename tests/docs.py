"""The documentation: `python -m tests.docs` builds the site without a warning and runs
the blocks, links and pictures of README.md and docs/ (tests/test_readme.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

COMMANDS = (
    ("sphinx", "-q", "-E", "-W", "--keep-going", "-b", "html", "docs", "docs/_build"),
    ("pytest", "-q", "tests/test_readme.py"),
)


def main() -> int:
    """Runs both from the project's folder; 1 if one failed."""
    root = Path(__file__).parents[1]
    codes = [
        subprocess.run([sys.executable, "-m", *command], cwd=root).returncode
        for command in COMMANDS
    ]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
