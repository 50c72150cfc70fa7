"""What a fresh install finds of ordinary problems."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Annotated, NamedTuple

import numpy as np
from cyclopts import Parameter
from cyclopts.validators import Number

from benchmarks.problems import GB, pipeline, stage_costs
from benchmarks.timing import timed
from optpipe.evaluate.objective import gap
from optpipe.model.problem import Problem
from optpipe_cache import Cache, release_pack
from optpipe_solver.bounds import lower_bound

DEVICES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)


def cache(*, lookups: Annotated[int, Parameter(validator=Number(gte=2))] = 100) -> None:
    """Look ordinary problems up in an empty cache with the release's pack. Times are of the processor."""
    random = np.random.default_rng(0)
    with TemporaryDirectory() as folder:
        fresh = Cache(Path(folder) / "fresh.sqlite", pack=release_pack())
        _looked_up(fresh, next(ordinary_problems(random, 1)))  # waits for what is compiled
        lookups_with_pack = [_looked_up(fresh, problem) for problem in ordinary_problems(random, lookups)]
    hits = [hit for hit in lookups_with_pack if hit]
    print(f"{lookups} ordinary problems, first lookup with the pack: {len(hits) / lookups:.0%} found")
    if len(hits) > 1:
        print(_spread("distance: ", [hit.distance for hit in hits], ".2f"))
        print(_spread("gap: ", [hit.gap for hit in hits if hit.gap is not None], ".1%"))
        print(_spread("ms: ", [hit.ms for hit in hits], ".0f"))


def _spread(name: str, values: Sequence[float], form: str) -> str:
    return f"{name}median {median(values):{form}}, 95% {quantiles(values, n=20)[-1]:{form}}"


class Hit(NamedTuple):
    distance: float
    gap: float | None
    ms: float


def _looked_up(cache: Cache, problem: Problem) -> Hit | None:
    hit, ms = timed(lambda: cache.lookup(problem), time.process_time)
    return Hit(hit.distance, gap(hit.schedule.makespan_ms, lower_bound(problem)), ms) if hit else None


def ordinary_problems(random: np.random.Generator, n: int) -> Iterator[Problem]:
    """Pipelines as they are often seen: 2 to 32 devices, up to eight micro-batches a device; backwards of an input take
    up to 1.3 forwards, those of weights 0.65 to 1, each measured with 3 % noise; memory for half as many micro-batches
    as there are devices to twice as many; an activation cannot leave, or does so in half a forward to four; some are
    computed again."""
    for number in range(n):
        p = int(random.choice(DEVICES))
        offload, recompute, full_duplex = random.choice([(0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1)])
        backward, weight = random.uniform(1.0, 1.3), random.uniform(0.65, 1.0)
        link, fit = 2 ** random.uniform(-1, 2), p * 2 ** random.uniform(-1, 1)
        saved = int(random.uniform(0.8 if full_duplex else 0.4, 1.0 if full_duplex else 0.7) * GB)
        m = int(p * random.uniform(1, 8))
        stages = []
        for _ in range(p):
            noise = random.normal(1, 0.03, 6).tolist()
            stage = stage_costs((10 * noise[0], 10 * backward * noise[1], 10 * weight * noise[2]), GB, saved)
            if offload:
                stage |= {"offload_ms": 10 * link * noise[3], "reload_ms": 10 * link * noise[4], "offload_bytes": GB}
            if recompute:
                stage |= {"recompute_ms": 10 * noise[5], "checkpoint_bytes": GB // 12}
            stages.append(stage)
        yield pipeline(
            stages,
            m,
            int(max(1.05, fit) * GB),
            name=f"{number}: {p}x{m}",
            p2p_ms=random.uniform(0, 0.6),
            transfer_mode="full_duplex" if full_duplex else "half_duplex",
        )
