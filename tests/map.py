"""The rooms of fxsched, what each holds and imports: python -m tests.map."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fxsched"


class Module(NamedTuple):
    """A file of the package: its name without "fxsched.", such as ir.graphs."""

    name: str
    path: Path

    @property
    def room(self) -> str:
        """Its folder; a file of fxsched/ itself is a room of its own."""
        folder = self.path.parent
        return self.name if folder == PACKAGE else _name(folder)


def _name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def modules() -> dict[str, Module]:
    """All of them, by name; a room's __init__ has the room's name."""
    found = {}
    depths = ("*.py", "*/*.py", "*/*/*.py")
    paths = [path for depth in depths for path in PACKAGE.glob(depth)]
    for path in sorted(paths):
        name = _name(path).removesuffix(".__init__")
        found[name] = Module(name, path)
    return found


MODULES = modules()


@cache
def imports(module: Module) -> tuple[str, ...]:
    """Full names of what a module imports, its own package's as fxsched.x."""
    return tuple(_imports(module))


def _imports(module: Module) -> Iterator[str]:
    here = module.path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(module.path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = here[: len(here) + 1 - node.level] if node.level else ()
            base = ".".join([*start, *filter(None, [node.module])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                known = full.removeprefix("fxsched.") in MODULES
                yield full if known or not base.startswith("fxsched") else base


def own_imports(module: Module) -> list[str]:
    """Names of the modules of fxsched that a module imports."""
    mine = [name for name in imports(module) if name.startswith("fxsched.")]
    return [name.removeprefix("fxsched.") for name in mine]


def rooms() -> list[str]:
    """Names of the folders of fxsched/, as passes.step."""
    depths = ("*/__init__.py", "*/*/__init__.py")
    return sorted(
        _name(path.parent) for depth in depths for path in PACKAGE.glob(depth)
    )


def files(room: str) -> list[Module]:
    return [m for m in MODULES.values() if m.room == room and m.name != room]


def arrows(room: str) -> list[str]:
    """The other rooms, and files of fxsched/ itself, that a room imports."""
    here = [m for m in MODULES.values() if m.room == room]
    found = {MODULES[name].room for module in here for name in own_imports(module)}
    return sorted(found - {room})


def contract(room: str) -> tuple[str, list[str]]:
    """What a room says at the head of its __init__.py: its purpose, and its imports."""
    text = ast.get_docstring(ast.parse(MODULES[room].path.read_text())) or ""
    purpose = " ".join(text.split("\n\n")[0].split())
    declared = re.search(r"^Imports: (.*?)\.$", text, re.MULTILINE | re.DOTALL)
    names = re.split(r",\s+", declared[1]) if declared else []
    return purpose, [name for name in names if name != "nothing"]


def lines(room: str) -> int:
    """How many the room has."""
    here = [m for m in MODULES.values() if m.room == room]
    return sum(len(module.path.read_text().splitlines()) for module in here)


def main() -> None:
    """Prints what each room is for, its size and what it imports, and the sums."""
    for room in rooms():
        purpose, _ = contract(room)
        print(f"{room}: {purpose} ({len(files(room))} files, {lines(room):,} lines)")
        print(f"    imports {' '.join(arrows(room)) or 'nothing'}")
    own = [m for m in MODULES.values() if m.path.parent == PACKAGE]
    print("\nfiles of no room, each with its lines:")
    print(", ".join(f"{m.path.name} {lines(m.room)}" for m in own))
    count = sum(len(arrows(r)) for r in rooms())
    total = sum(map(lines, rooms())) + sum(lines(m.room) for m in own)
    print(f"\n{len(rooms())} rooms, {count} arrows from them, {total:,} lines")


if __name__ == "__main__":
    main()
