"""Which module may import which: read off the import statements of every file."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A module imports only what stands in a layer above its own.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("models", "user_line"),
    ("jobs",),
    ("rows",),
    ("moves", "picks", "mixes", "complaints"),
    ("products", "scores"),
    ("rowrules",),
    (
        "ops",
        "eventloop",
        "request",
        "boundary",
        "loss_scale",
        "modes",
        "cuts",
        "arguments",
        "orders",
        "lazy",
        "caller",
        "origins",
        "control",
    ),
    ("graphs", "stages", "ideals", "bars", "scales"),
    (
        "lines",
        "arithmetic",
        "checkpoints",
        "examine",
        "frame",
        "data_parallel",
        "pipelines",
        "looped",
        "servers",
        "zero_bubble",
        "branches",
    ),
    (
        "schedules",
        "costs",
        "partitioner",
        "counts",
        "svg",
        "page",
        "terminal",
        "chrome",
    ),
    (
        "check",
        "show",
        "aot",
        "inputs",
        "writes",
        "planner",
        "measure",
        "diagram",
        "links",
        "parcels",
        "flats",
        "meta_device",
        "refusals",
    ),
    ("tracker", "early"),
    ("watch", "whole", "returns"),
    ("backsplit", "calls", "simulate", "compare", "kept", "digest", "batch"),
    ("departures", "outputs"),
    ("passes",),
    ("trace", "pipeline", "inductor", "table1"),
    ("neighbours", "padding"),
    ("transport", "program", "source"),
    ("straight", "local"),
    ("runtime", "clip", "optimizers", "agreement"),
    ("workers", "checkpoint"),
    ("step",),
    ("backend",),
    ("verify",),
    ("stage_costs", "tasks", "candidates"),
    ("replay",),
    ("fill",),
    ("climb",),
    ("contest",),
    ("search",),
    ("demo", "values"),
    ("options", "userfile"),
    ("timing",),
    ("lineup",),
    ("commands", "planning"),
    ("cli",),
    ("__main__", "__init__"),
)

# Who alone may import a library, and what is under it.
KEEPERS: dict[str, tuple[str, ...]] = {
    "torch.distributed": ("transport",),
    "torch._dynamo": ("trace",),
    "torch._functorch": ("aot",),
    "torch._inductor": ("inductor",),
    "torch.fx._lazy_graph_module": ("lazy",),
    "tabulate": ("show",),
    "tqdm": ("demo", "search"),
    "click": ("cli", "commands", "options", "planning", "timing", "values"),
}

# Third-party packages by layer; torch is everywhere.
LIBRARIES: dict[str, tuple[str, ...]] = {
    "models": (),
    "passes": ("networkx",),
    "jobs": ("networkx",),
}


def files() -> dict[str, Path]:
    """Each module's path, by its name inside the package, such as passes.order."""
    found = {path.stem: path for path in sorted((ROOT / "fxsched").glob("*.py"))}
    for folder in ("passes", "models"):
        for path in sorted((ROOT / folder).glob("*.py")):
            name = folder if path.stem == "__init__" else f"{folder}.{path.stem}"
            found[name] = path
    return found


FILES = files()


def imports(name: str) -> Iterator[str]:
    """Full names of what a module imports, its own package's as fxsched.x."""
    package = ["fxsched", *name.split(".")[:-1]]
    if name in ("passes", "models"):
        package = ["fxsched", name]
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*start, *filter(None, [node.module])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                known = full.removeprefix("fxsched.") in FILES
                yield full if known or not base.startswith("fxsched") else base


def own_imports(name: str) -> list[str]:
    mine = [i for i in imports(name) if i.startswith("fxsched")]
    return [i.removeprefix("fxsched.") for i in mine]


def layer(name: str) -> int:
    top = name.split(".")[0]
    found = [i for i, members in enumerate(LAYERS) if top in members]
    assert found, f"{name} stands in no layer of LAYERS"
    return found[0]


def is_under(name: str, library: str) -> bool:
    return name == library or name.startswith(library + ".")


@pytest.mark.parametrize("name", FILES)
def test_a_module_imports_only_what_stands_above_it(name: str) -> None:
    for imported in own_imports(name):
        inside_models = imported.split(".")[0] == name.split(".")[0] == "models"
        allowed = inside_models or layer(imported) < layer(name)
        assert allowed, f"{name} imports {imported}"


def test_models_do_not_import_each_other_in_a_circle() -> None:
    models = [name for name in FILES if name.startswith("models.")]
    for a, b in combinations(models, 2):
        assert not (b in own_imports(a) and a in own_imports(b)), (a, b)


def keeper_cases() -> list[tuple[str, str]]:
    return [
        (name, library)
        for library in KEEPERS
        for name in FILES
        if any(is_under(i, library) for i in imports(name))
    ]


@pytest.mark.parametrize(("name", "library"), keeper_cases())
def test_a_library_is_known_to_its_keepers_alone(name: str, library: str) -> None:
    assert name in KEEPERS[library]


@pytest.mark.parametrize("library", KEEPERS)
def test_every_keeper_is_needed(library: str) -> None:
    for keeper in KEEPERS[library]:
        assert any(is_under(i, library) for i in imports(keeper)), keeper


@pytest.mark.parametrize("name", FILES)
def test_a_layer_uses_only_its_libraries(name: str) -> None:
    allowed = LIBRARIES.get(name.split(".")[0])
    if allowed is None:
        return
    tops = {i.split(".")[0] for i in imports(name)}
    foreign = tops - set(sys.stdlib_module_names) - {"fxsched", "torch", *allowed}
    assert not foreign, f"{name} imports {sorted(foreign)}"


def test_packages_are_the_folders_with_modules() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    setuptools = config["tool"]["setuptools"]
    folders = {"fxsched": "fxsched"} | {
        f"fxsched.{path.parent.name}": path.parent.name
        for path in sorted(ROOT.glob("*/__init__.py"))
        if path.parent.name not in ("fxsched", "tests")
    }
    assert sorted(setuptools["packages"]) == sorted(folders)
    assert setuptools["package-dir"] == folders


@pytest.mark.parametrize("folder", ["passes", "models"])
def test_an_uninstalled_checkout_finds_the_packages(folder: str) -> None:
    link = ROOT / "fxsched" / folder
    assert link.is_symlink() and link.resolve() == ROOT / folder
