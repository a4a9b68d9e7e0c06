"""Which values of a job check_finite=True looks at."""

from __future__ import annotations

from torch import fx

from ...ir.graphs import arguments
from ...ir.meta import of_call
from ...ir.step import Recipe
from ...jobs.job import Direction


def checked_values(recipe: Recipe, trains: bool) -> tuple[tuple[int, str], ...]:
    """The places of what a job makes that must be finite, and what they are called: of
    F what has a gradient, since masks may be of -inf; of B and W all gradients.

    trains: whether there are gradients; where there are none, F's loss and outputs.
    """
    call = recipe.call
    forward = of_call(call)["direction"] is Direction.FORWARD
    return tuple(
        (arguments(node)[1], node.name)
        for node in recipe.after
        if node.args[0] is call and _must_be_finite(node, forward, trains)
    )


def _must_be_finite(node: fx.Node, forward: bool, trains: bool) -> bool:
    if not forward:
        return "group" in of_call(node) or not of_call(node).get("bundle")
    if trains:
        return bool(of_call(node).get("trained"))
    return any(user.op == "output" for user in node.users)
