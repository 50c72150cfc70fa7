"""Megatron's own offload for a candidate: which modules, and which part of what they save.

What is copied costs nothing while links keep up with compute, so the cheapest setting that fits copies least, unless
another one is shorter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations

from optpipe.errors import InputError
from optpipe.evaluate.objective import shorter
from optpipe.model.records import Stage
from optpipe.schedule import Schedule
from optpipe.transformer.offload import MODULES, module_groups
from optpipe.transformer.times import MS
from optpipe_solver import tuning
from optpipe_solver.planner.candidate import Candidate
from optpipe_solver.systems.megatron_offload import offloading


def offloads(candidate: Candidate, below_ms: float) -> Iterator[Schedule]:
    """Yield schedules of Megatron's policy for iterations that may be shorter than `below_ms`, the fewest copied bytes
    first, up to one that fits and is not prolonged."""
    if not candidate.has_formula or min(memory.budget for memory in candidate.estimate.devices) <= 0:
        return
    has, tried = candidate.estimate.gpu.memory_bytes, 0
    for modules, fraction, freed in choices(candidate):
        plain_ms, held = candidate.looped(freed)
        if held > has or not shorter(plain_ms, min(below_ms, candidate.iteration_ms)):
            continue
        try:
            schedule = with_setting(candidate, modules, fraction)
        except InputError:  # Megatron has no such stages, or stops
            continue
        yield schedule
        tried += 1
        fits = not schedule.compiled.complaints
        if tried == tuning.OFFLOADS or (fits and not shorter(plain_ms, candidate.with_step_end(schedule.makespan_ms))):
            return


def with_setting(candidate: Candidate, modules: Sequence[str], fraction: float) -> Schedule:
    """The schedule of Megatron's policy on the candidate's layers as stages. Its method has the arguments.

    Raises InputError if Megatron has no such stages, or would stop.
    """
    problem, estimate = candidate.problem, candidate.estimate
    layers, by_device = problem.layers or (), zip(estimate.order, estimate.stages, strict=True)
    stages = [Stage(device=d, **dict(layers[i])) for d, pieces in by_device for i in pieces]
    groups = [[*module_groups(piece, modules, estimate.run)] for piece in estimate.pieces]
    problem = problem.replace(stages=stages, overlap_factor=None)
    schedule = offloading(problem, groups, MS / estimate.clock.links.host_speed, fraction)
    method = "1f1b" if estimate.parallelism.chunks == 1 else "interleaved"
    method += f" --fine-grained-activation-offloading --offload-modules {' '.join(modules)}"
    return replace(schedule, method=method + f" --activation-offload-fraction {fraction}" * (fraction < 1))


def choices(candidate: Candidate) -> list[tuple[tuple[str, ...], float, list[float]]]:
    """Modules and fractions with the bytes of each piece that they free, those that copy least first."""
    estimate = candidate.estimate
    has = [{group.module: group for group in module_groups(piece, MODULES, estimate.run)} for piece in estimate.pieces]
    # What is computed again is not saved: all of a layer, or core attention, whose output then stays, too.
    without = {"full": set(MODULES), "selective": {"core_attn", "attn_proj"}}.get(estimate.run.recompute, set())
    able = [m for m in MODULES if m not in without and any(m in each and each[m].copied for each in has)]
    found = []
    for modules in chain.from_iterable(combinations(able, n) for n in range(1, len(able) + 1)):
        if "attn_proj" in modules and "core_attn" not in modules:  # which Megatron refuses
            continue
        groups = [[each[module] for module in modules if module in each] for each in has]
        for fraction in tuning.OFFLOAD_FRACTIONS:
            freed = [fraction * sum(group.freed for group in each) for each in groups]
            copied = fraction * sum(group.copied for each in groups for group in each)
            found.append((copied, modules, fraction, freed))
    return [each[1:] for each in sorted(found)]
