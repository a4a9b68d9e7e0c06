"""The documentation: `python -m tests.docs` builds the site without a warning and runs
the blocks, links and pictures of README.md and docs/ (tests/package/test_readme.py).
Each page is in docs/index.md twice: as a link, which GitHub shows, and in a toctree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

COMMANDS = (
    ("sphinx", "-q", "-E", "-W", "--keep-going", "-b", "html", "docs", "docs/_build"),
    ("pytest", "-q", "tests/package/test_readme.py"),
)


def main() -> int:
    """Runs both from the project's folder; 1 if one failed or a page isn't linked."""
    root = Path(__file__).parents[1]
    index = (root / "docs" / "index.md").read_text()
    names = sorted(page.name for page in (root / "docs").glob("*.md"))
    missing = [name for name in names if f"({name})" not in index]
    missing.remove("index.md")
    if missing:
        print(f"docs/index.md has no link to {', '.join(missing)}")
    codes = [
        subprocess.run([sys.executable, "-m", *command], cwd=root).returncode
        for command in COMMANDS
    ]
    return int(any(codes) or bool(missing))


if __name__ == "__main__":
    sys.exit(main())
