"""Calls of ranks that several test files make."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime import Layout
from support.close import joined, require_close
from support.ranks import cases
from support.ranks.device import EXACT
from support.ranks.worker import Ranks


def same(ranks: Ranks, placement: list[int], programs: list[Any], **stage: Any) -> list[Any]:
    """`train_as_plain` by these programs."""
    problem = cases.problem(placement, sum(text.startswith("0F") for each in programs[0] for text in each), **stage)
    return train_as_plain(ranks, [Schedule.parse(problem, texts) for texts in programs])


def train_as_plain(ranks: Ranks, schedules: list[Schedule], exact: bool = EXACT) -> list[Any]:
    """Trains one step with each schedule and compares with the plain run; returns the ranks' reports."""
    layout = Layout.from_problem(schedules[0].problem)
    placement = layout.placement
    results = ranks(cases.train, placement=placement, schedules=schedules)
    for report in (report for reports, _ in results for report in reports):
        assert report.buffer_peak_bytes == report.buffer_certified_bytes
    losses, gradients = cases.plain(len(placement), layout.microbatches, len(schedules))
    for step in range(len(schedules)):
        if EXACT:
            assert results[placement[-1]][0][step].losses == losses[step]
        np.testing.assert_allclose(results[placement[-1]][0][step].losses, losses[step], rtol=1e-5)
        found = joined(by_step[step] for _, by_step in results)
        if exact:
            np.testing.assert_equal(found, gradients[step], err_msg=f"step {step}")
        else:
            require_close(found, gradients[step], atol=1e-7 if EXACT else 1e-5)
    return [reports for reports, _ in results]


@cache
def measured(ranks: Ranks, placement: tuple[int, ...], peers: tuple[int | None, ...]) -> Problem:
    problem: Problem = ranks(cases.measure, placement=placement, microbatches=3, offload_parts=2, peers=peers)[0]
    for stage in problem.stages:
        assert stage.can_evict == (peers[stage.device] is not None)
        assert not stage.can_evict or (stage.offload_bytes or 0) <= (stage.evict_bytes or 0) <= stage.activation_bytes
    return problem
