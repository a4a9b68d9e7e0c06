"""Which room may import which: read off contracts and import statements."""

from __future__ import annotations

import sys

import networkx as nx
import pytest

import fxsched

from ..map import MODULES, ROOT, arrows, contract, files, imports, own_imports, rooms

# Who alone may import a library, and what is under it.
KEEPERS: dict[str, tuple[str, ...]] = {
    "torch.distributed": (
        "transport.device_groups",
        "transport.processes",
        "transport.world",
        "transport.wrappers",
        "checkpoint.tensor_files",
    ),
    "torch._dynamo": (
        "capture.dynamo",
        "torch_compat.frames",
        "torch_compat.compiled_modules",
        "torch_compat.tracebacks",
    ),
    "torch.export": ("capture.exported_graph",),
    "torch._functorch": ("autodiff.autograd",),
    "torch._inductor": ("autodiff.inductor",),
    "torch.fx._lazy_graph_module": ("ir.lazy",),
    "safetensors": ("checkpoint.weight_files",),
    "tabulate": ("draw.tables",),
    "tqdm": ("cli.demo", "progress"),
    "click": (
        "cli.main",
        "cli.commands",
        "cli.options",
        "cli.model_commands",
        "cli.plan_options",
        "cli.simulate_options",
        "cli.option_types",
        "cli.stability_command",
        "cli.blame_command",
        "cli.network_command",
    ),
}

# Third-coordinator packages by room; torch is everywhere.
LIBRARIES: dict[str, tuple[str, ...]] = {
    "models": (),
    "passes": ("networkx",),
    "jobs": ("networkx",),
}


def is_under(name: str, library: str) -> bool:
    return name == library or name.startswith(library + ".")


@pytest.mark.parametrize("room", rooms())
def test_a_room_imports_what_its_contract_names(room: str) -> None:
    purpose, declared = contract(room)
    assert purpose.endswith(".") and len(purpose) < 176, purpose
    assert declared == arrows(room)


def test_rooms_have_floors() -> None:
    graph: nx.DiGraph[str] = nx.DiGraph()
    for module in MODULES.values():
        for own in own_imports(module):
            if MODULES[own].room != module.room:
                graph.add_edge(module.room, MODULES[own].room)
    assert nx.is_directed_acyclic_graph(graph), nx.find_cycle(graph)


@pytest.mark.parametrize("room", rooms())
def test_files_of_a_room_have_floors(room: str) -> None:
    inside = {module.name for module in files(room)}
    graph = nx.DiGraph(
        (module.name, own)
        for module in files(room)
        for own in own_imports(module)
        if own in inside
    )
    assert nx.is_directed_acyclic_graph(graph), nx.find_cycle(graph)


def keeper_cases() -> list[tuple[str, str]]:
    return [
        (name, library)
        for library in KEEPERS
        for name, module in MODULES.items()
        if any(is_under(i, library) for i in imports(module))
    ]


@pytest.mark.parametrize(("name", "library"), keeper_cases())
def test_a_library_is_known_to_its_keepers_alone(name: str, library: str) -> None:
    assert name in KEEPERS[library]


@pytest.mark.parametrize("library", KEEPERS)
def test_every_keeper_is_needed(library: str) -> None:
    for keeper in KEEPERS[library]:
        assert any(is_under(i, library) for i in imports(MODULES[keeper])), keeper


@pytest.mark.parametrize("name", MODULES)
def test_a_room_uses_only_its_libraries(name: str) -> None:
    allowed = LIBRARIES.get(MODULES[name].room)
    if allowed is None:
        return
    tops = {i.split(".")[0] for i in imports(MODULES[name])}
    foreign = tops - set(sys.stdlib_module_names) - {"fxsched", "torch", *allowed}
    assert not foreign, f"{name} imports {sorted(foreign)}"


@pytest.mark.parametrize("folder", ["passes", "models"])
def test_an_uninstalled_checkout_finds_the_packages(folder: str) -> None:
    link = ROOT / "fxsched" / folder
    assert link.is_symlink() and link.resolve() == ROOT / folder


def test_the_page_names_each_room_once_in_an_order_of_floors() -> None:
    page = ROOT / "docs" / "how_it_works.md"
    text = page.read_text().split("| room | read |\n")[1].split("\n\n")[0]
    named = [row.split("|")[1].strip() for row in text.strip().split("\n")[1:]]
    assert sorted([*named, "models"]) == rooms()
    for i, room in enumerate(named):
        later = set(named[i:]) & set(arrows(room))
        assert not later, f"{room} imports {later}, which the page has below it"


def test_tests_follow_the_rooms() -> None:
    """Those of all rooms together are in tests/package."""
    folders = {path.parent.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert folders <= {*rooms(), "package"}


def test_the_package_shows_its_public_names() -> None:
    assert dir(fxsched) == sorted([*fxsched.__all__, "__version__"])
