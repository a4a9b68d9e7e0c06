"""What workers hold of gradients that are added in the order of microbatches."""

from __future__ import annotations

from collections.abc import Iterator

from .memory_changes import END, GRADIENTS, START, Change, StepChanges

Term = tuple[int, int, int]  # microbatch, place of the job, worker


def ordered_gradients(step: StepChanges) -> Iterator[Change]:
    """Each microbatch's, from its job until its turn to be added, on the worker that
    adds them up; and the sum, there until it is sent, or its update."""
    terms: dict[tuple[int, int], list[Term]] = {}
    for place, kind, b, worker in step.regular:
        for g in step.gives[kind]:
            terms.setdefault((g, b // step.every), []).append((b, place, worker))
    updated = {(s, k, w): place for place, s, k, w in step.updates}
    first: dict[tuple[int, int], int] = {}
    for place, stage, k, _ in step.updates:
        first.setdefault((stage, k), place)
    for (g, k), own in terms.items():
        group, workers = step.groups[g], {worker for _, _, worker in own}
        size, root = group.finished, group.root
        adder = root if len(workers) > 1 else own[0][2]
        ready, met, begun, start = 0, 0, False, min(own)[0]
        for i, (b, place, worker) in enumerate(sorted(own)):
            if b != start and not begun:
                begun = True
                yield from step.widened(group, adder, met)
            ready = max(ready, place)
            met = 4 * ready + END
            if i and len(workers) == 1 and place == ready:
                continue  # added as it is made
            yield 4 * place + START, worker, GRADIENTS, size
            if worker != adder:
                yield 4 * place + END, worker, GRADIENTS, -size
                yield 4 * place + END, adder, GRADIENTS, size
            if len(workers) > 1:
                met = step.summed(adder, ready)
            if step.updates:
                met = min(met, 4 * first[group.stage, k] + START)
            if i:
                yield met, adder, GRADIENTS, -size
        if not begun:
            yield from step.widened(group, adder, met)
        if adder != root:
            yield met, adder, GRADIENTS, -group.gradients
            yield met, root, GRADIENTS, group.gradients
        yield from step.cast(group, root, met)
        for worker in group.updaters:
            if worker != root:
                yield met, worker, GRADIENTS, group.finished
            if step.updates:
                end = updated[group.stage, k, worker]
                yield 4 * end + END, worker, GRADIENTS, -group.finished
