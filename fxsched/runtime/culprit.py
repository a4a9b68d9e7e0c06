"""What an error in a program says besides: the job, and the user's line."""

from __future__ import annotations

from torch import fx

from ..draw.program_table import program_table
from ..ir.finite import NonFinite
from ..ir.model_lines import LINES, line_in_model
from ..jobs.job import Job
from .graph_functions import failed_node
from .nonfinite import first_nonfinite
from .tasks import Task

WORDS = {"F": "forward", "B": "backward", "W": "weights' gradients", "U": "update"}


def add_culprit(error: Exception, worker: int, gm: fx.GraphModule, task: Task) -> None:
    """Adds notes to an error that came up in a task of a worker's program: the job, the
    module and line of the user's model, if one operation of it failed; and the
    worker's table around it."""
    waits = isinstance(error, (ConnectionError, TimeoutError))
    what = f"job {task.name} ({_words(task.job)})" if task.job else task.name
    where = "" if waits else _line(error, gm, task)
    how = "waiting in" if waits else "in"
    error.add_note(f"fxsched: {how} {what} on worker {worker}{where}")
    error.add_note(program_table(gm, worker, True, width=88, around=task.name))


def _words(job: Job) -> str:
    rows = "all rows" if job.joint else f"microbatch {job.microbatch}"
    return f"{WORDS[job.direction.value]} of stage {job.stage}, {rows}"


def _line(error: Exception, gm: fx.GraphModule, task: Task) -> str:
    node = failed_node(error)
    for call in task.nodes:
        if call.op == "call_module":
            stage = gm.get_submodule(str(call.target))
            if isinstance(error, NonFinite) and isinstance(stage, fx.GraphModule):
                node = first_nonfinite(stage, error.given)
            if node is None:
                return ""
            lines = getattr(stage, "meta", {}).get(LINES)
            return str((lines and line_in_model(node, lines)) or "")
    return ""
