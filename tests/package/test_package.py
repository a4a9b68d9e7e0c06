"""What `import fxsched` gives, and when PyTorch is imported for it."""

from __future__ import annotations

import ast
import os
import platform
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from hatchling.build import build_sdist, build_wheel

import fxsched


def run(code: str) -> str:
    """What a new Python prints, with torch nowhere to be found if it starts so."""
    command = [sys.executable, "-W", "error::ImportWarning", "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


MODULES = ("ops", "passes", "schedules")
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None\n"


@pytest.mark.parametrize("name", fxsched.__all__)
def test_each_public_name_is_what_its_module_has(name: str) -> None:
    value = getattr(fxsched, name)
    home = sys.modules[f"fxsched.{fxsched.HOMES[name]}"]
    assert value is (home if name in MODULES else getattr(home, name))


def test_type_checkers_find_the_public_names() -> None:
    tree = ast.parse(Path(fxsched.__file__).read_text("utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    found = [alias.asname for node in imports for alias in node.names if alias.asname]
    assert sorted(found) == fxsched.__all__


def test_another_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="fxsched' has no attribute 'gpipe'"):
        fxsched.gpipe  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        "import fxsched.backend",
        "from fxsched.tuner.search import search",
        "from fxsched.backend import Backend",
        "import fxsched; fxsched.backend; import fxsched.backend",
        "import fxsched, fxsched.schedules; from fxsched import *",
    ],
)
def test_modules_with_the_names_of_functions_do_not_hide_them(first: str) -> None:
    then = "import fxsched, types; print(type(fxsched.backend).__name__)"
    assert run(f"{first}; {then}; print(fxsched.schedules.__name__)") == (
        "function\nfxsched.schedules\n"
    )


def test_words_schedules_and_simulations_need_no_torch() -> None:
    """But for what workers send and hold, which is counted on a step."""
    code = (
        "import fxsched as f; s = f.schedules.gpipe(2, 2); print(f.simulate(s).latency)"
    )
    assert run(WITHOUT_TORCH + code) == "9.0\n"


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["compare", "--help"], ["simulate", "--help"]],
)
def test_help_needs_no_torch(arguments: list[str]) -> None:
    code = f"from fxsched.cli.main import main; main({arguments!r})"
    assert run(WITHOUT_TORCH + code)


def test_the_command_says_its_version_and_those_it_runs_on() -> None:
    said = run("from fxsched.cli.main import main; main(['--version'])")
    torch, python = version("torch"), platform.python_version()
    assert said == f"fxsched {fxsched.__version__}, PyTorch {torch}, Python {python}\n"


def test_wheel_and_sdist_have_each_file_once_and_the_licence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, folder = Path(__file__).parents[2], str(tmp_path)
    monkeypatch.chdir(root)  # where builders are called
    archived = zipfile.ZipFile(tmp_path / build_wheel(folder))
    wheel = archived.namelist()
    with tarfile.open(tmp_path / build_sdist(folder)) as archive:
        source = archive.getnames()
    assert len(set(wheel)) == len(wheel) and len(set(source)) == len(source)
    written = {
        os.path.join(path, name)
        for path, _, names in os.walk("fxsched", followlinks=True)
        for name in names
        if name.endswith(".py")
    }
    assert written <= set(wheel)
    info = f"fxsched-{fxsched.__version__}"
    assert f"{info}.dist-info/licenses/LICENSE" in wheel
    points = archived.read(f"{info}.dist-info/entry_points.txt").decode()
    assert "[torch_dynamo_backends]\nfxsched = fxsched.named:NAMED\n" in points
    for name in (
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "fxsched/passes/step/order.py",
    ):
        assert f"{info}/{name}" in source
    assert not [name for name in wheel if name.startswith("tests/")]
