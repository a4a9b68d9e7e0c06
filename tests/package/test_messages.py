"""Every error says what to do; the page of errors quotes those that there are."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fxsched
from fxsched import PlanError, schedules
from fxsched.checker.summary import CheckError
from fxsched.cli.main import main
from fxsched.ir.chosen import _most
from fxsched.runtime.local_rows import spread_rows
from fxsched.simulator.timeline_comparison import Timing

ROOT = Path(__file__).parents[2]
ERRORS = ("PlanError", "MemoryLimitError")
# words that tell people what to do, or what is allowed
REMEDY = (
    "add|allow|average|call|cast|choose|clone|close|compare|compile|compute|"
    "convert|create|cut|deal|define|detach|draw|drop|evaluate|export|fetch|fill|"
    "fit|freeze|give|gives|install|leave|let|make|move|must|needs|pad|pass|put|"
    "raise|reduce|register|replace|return|save|say|shut|split|take|takes|try|"
    "turn|use|wait|works|wrap|write"
)
# nouns too, so that these count where a part begins
SAME = "do|know|load|mean|name|number|plan|read|run|see|set|share|start|step|train|keep"


def words_of(node: ast.AST) -> list[str]:
    """The constant parts of strings in a piece of code, with single spaces."""
    constants = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant))
    return [re.sub(r"\s+", " ", c) for c in constants if isinstance(c, str)]


def text_of(node: ast.AST) -> str:
    """A message as it is written, with code in braces."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    return f"{{{ast.unparse(node)}}}"


def messages() -> Iterator[tuple[str, str]]:
    """Where each PlanError is made, and what it says."""
    for folder in ("fxsched", "passes"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                name = getattr(getattr(node, "func", None), "id", "")
                if isinstance(node, ast.Call) and node.args and name in ERRORS:
                    where = f"{path.relative_to(ROOT)}:{node.lineno}"
                    yield where, text_of(node.args[0])


def says_what_to_do(text: str) -> bool:
    """Whether a message does, after its first word. What ends in braces is said, or
    handed on, by other code; what begins with "it" has its file before it, and what to
    do behind."""
    rest = " ".join(text.split()[1:])
    wrapped = text.endswith("}") or text.startswith(("it ", "its "))
    told = rf"\b(?:{REMEDY}|every rank)\b|[;:] (?:{SAME})\b"
    return wrapped or bool(re.search(told, f": {rest}"))


def test_each_error_says_what_to_do() -> None:
    """First what is wrong, and where; then what is allowed, or what to do."""
    found = dict(messages())
    bare = {where: text for where, text in found.items() if not says_what_to_do(text)}
    assert len(found) > 350 and bare == {}


@pytest.mark.slow
def test_the_page_quotes_messages_that_there_are() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quotes = re.findall(r"^### (.*)$", page, re.M)
    said = [  # what each function says
        re.sub(r"\s+", " ", " ".join(words_of(function)))
        for folder in ("fxsched", "passes")
        for path in (ROOT / folder).rglob("*.py")
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
    ]
    assert len(quotes) > 25
    for quote in quotes:
        parts = [part.strip() for part in quote.split("..")]
        assert any(all(part in each for part in parts) for each in said), quote


# Those that no other file's tests hold.


class Extra(nn.Linear):
    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None:
        pass


def test_of_checkpoints(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(PlanError, match="a list; give a file with a state_dict"):
        fxsched.load_weights(tmp_path / "list.pt", nn.Linear(2, 2))
    with pytest.raises(PlanError, match=r"which safetensors can't hold; use fxs"):
        fxsched.save_weights(tmp_path / "weights", Extra(2, 2))
    fxsched.save(tmp_path / "saved", model := nn.Linear(2, 2), extra={"n": 3})
    with pytest.raises(PlanError, match="leave it out: load returns its value"):
        fxsched.load(tmp_path / "saved", model, extra={"n": 3})
    with pytest.raises(PlanError, match="has a tensor bias, which isn't in this model"):
        fxsched.load(tmp_path / "saved", nn.Linear(2, 2, bias=False))


def test_of_schedules(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="it says how replicas are averaged; give aver"):
        fxsched.Schedule(2, 2, 2, w=lambda s, b, d: (0, 0), n=lambda *_: 0, elastic=0.5)
    schedules.gpipe(2, 2).save(tmp_path / "gpipe.json")
    record = json.loads((tmp_path / "gpipe.json").read_text()) | {"average_every": 1}
    (tmp_path / "gpipe.json").write_text(json.dumps(record))
    with pytest.raises(PlanError, match="it has 'average_every' without updates"):
        fxsched.load_schedule(tmp_path / "gpipe.json")
    with pytest.raises(PlanError, match="give every direction one time, or a list"):
        fxsched.search({"F": [1, 2], "B": [1]}, workers=2, microbatches=2)


def test_of_options() -> None:
    sgd = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with pytest.raises(PlanError, match="a GradScaler's step is not in the program"):
        fxsched.backend(schedules.gpipe(2, 2), optimizer=sgd, loss_scale=2.0)
    server = fxsched.backend(schedules.parameter_server(3, 4), rows="local")
    graph: Any = None
    with pytest.raises(PlanError, match="worker 2 runs no jobs and has no rows"):
        spread_rows(graph, (), server.request, 2)


def test_of_pictures_and_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = fxsched.simulate(schedules.gpipe(2, 2))
    with pytest.raises(PlanError, match=r"give a name that ends with \.svg, \.html"):
        found.diagram().save(tmp_path / "step.pdf")
    events = list(found.timeline)
    with pytest.raises(PlanError, match="0F0 ran twice; give the events of one step"):
        Timing([*events, events[0]], "measured")
    with pytest.raises(SystemExit):
        main(["compare", "--schedules", "gpipe", "--group-size", "2"])
    assert "none of these schedules takes --group-size" in capsys.readouterr().err


def test_of_the_checker() -> None:
    plan = fxsched.plan(Mean(), schedules.gpipe(1, 2), torch.randn(4, 3))
    graph = plan.programs[0].graph
    job = next(node for node in graph.nodes if "job" in node.meta)
    with graph.inserting_after(job):
        graph.node_copy(job, lambda node: node)
    with pytest.raises(CheckError, match=f"{job.meta['job']} runs 2 times"):
        plan.check()


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()


class Branch(Mean):
    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return torch.cond(h.sum() > 0, torch.sin, torch.cos, (h,)).mean()


class Decides(Mean):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else self.linear(x).sum()


def planned(model: nn.Module, *inputs: Tensor) -> None:
    fxsched.plan(model, schedules.gpipe(2, 2), *inputs)


@pytest.mark.slow
def test_of_models() -> None:
    x = torch.randn(4, 3)
    with pytest.raises(PlanError, match="whose operations cannot be cut into jobs"):
        planned(Branch(), x)
    environment = ShapeEnv()
    with pytest.raises(
        PlanError, match="depends on values and has no upper limit; comp"
    ):
        _most(environment, environment.create_unbacked_symint())
    with (
        pytest.raises(PlanError, match=r"the model can't be traced; torch\.export st"),
        fxsched.compile(Decides(), schedules.gpipe(2, 2)) as run,
    ):
        run(x)
