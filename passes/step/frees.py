"""Lets go of values after their last use."""

from __future__ import annotations

from torch import fx

from ...ir import ops


def free_values(graph: fx.Graph) -> fx.Graph:
    """One free after each node that is the last to read some values of its worker.

    before: a_0 = job_0F0[0]; send(a_0, to=1, tag=3)
    after:  a_0 = job_0F0[0]; free(job_0F0); send(a_0, to=1, tag=3); free(a_0)

    Inputs of the program and what it returns stay. A value that nobody reads is freed
    where it is made.
    """
    output = graph.output_node()
    exempt = set(output.all_input_nodes)
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.target is ops.free:  # a pass of the user's own freed these
            exempt.update(node.all_input_nodes)
        for read in node.all_input_nodes:
            last[read] = node
    ends: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        stays = node.op in ("placeholder", "output") or node in exempt
        if not stays and node.target not in ops.VALUELESS:
            ends.setdefault(last.get(node, node), []).append(node)
    for node, values in ends.items():
        with graph.inserting_after(node):
            free = graph.call_function(ops.free, tuple(values))
        free.meta.update({k: node.meta[k] for k in ("worker", "task", "n")}, specs=())
    return graph
