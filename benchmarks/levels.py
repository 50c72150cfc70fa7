"""What several levels of recomputation are worth: one problem with each of its levels alone, and with all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.tables import head, line
from optpipe.anytime import solve
from optpipe.model.problem import Problem
from optpipe.model.records import Stage

NO_OFFLOAD = dict.fromkeys(("offload_ms", "reload_ms", "offload_bytes"))


def levels(problem: Path, /, *, memory: str = "2,2.5,3", seconds: float = 20.0, method: str = "auto") -> None:
    """Solve a problem by each level alone, by all levels, and also with checkpoints that may be offloaded.

    A cell has the makespan in ms and what it may be too long by at most. The last column says how much shorter the
    best of all levels is than the best of one.

    Parameters
    ----------
    problem
        A problem file whose stages have levels.
    memory
        Budgets, each as so many activations of every stage.
    seconds
        Of each search.
    """
    posed = Problem.load(problem)
    variants = {name: posed.replace(stages=stages) for name, stages in _variants(posed.stages)}
    print(head(("memory", *variants, "shorter by"), "r" * (len(variants) + 2)))
    for budget in map(float, memory.split(",")):
        cells, best = [], dict[bool, float]()
        for name, variant in variants.items():
            result = solve(variant.with_memory_for(budget), method=method, time_limit_s=seconds)
            if result.schedule is None:
                cells.append("–")
                continue
            ms = result.schedule.makespan_ms
            cells.append(f"{ms:.0f} ({1 - (result.lower_bound_ms or 0.0) / ms:.1%})")
            is_all = name.startswith("all")
            best[is_all] = min(ms, best.get(is_all, ms))
        gain = f"{1 - best[True] / best[False]:.1%}" if len(best) == 2 else "–"
        print(line((f"{budget:g}", *cells, gain)))


def _variants(stages: tuple[Stage, ...]) -> Iterator[tuple[str, list[Stage]]]:
    """Yield the stages with each level alone, with all of them, and with all and their checkpoints' offloads."""
    names = list(dict.fromkeys(level.name for stage in stages for level in stage.all_levels))

    def with_levels(chosen: list[str], **changes: Any) -> list[Stage]:
        each = [[x.model_copy(update=changes) for x in stage.all_levels if x.name in chosen] for stage in stages]
        gone = {"recompute_ms": None, "checkpoint_bytes": None}
        return [
            stage.model_copy(update={**gone, "levels": tuple(own) or None})
            for stage, own in zip(stages, each, strict=True)
        ]

    yield from ((name, with_levels([name], **NO_OFFLOAD)) for name in names)
    yield "all", with_levels(names, **NO_OFFLOAD)
    if any(stage.can_offload_checkpoints for stage in stages):
        yield "all, checkpoints leave", with_levels(names)
