"""Recordings of steps of several replicas in which nothing is wrong, or exactly one thing."""

from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from optpipe.formats import megatron
from optpipe.measured.recording import MeasuredOp, Recording
from optpipe.model.ops import Kind, Op
from optpipe.model.program import Program
from optpipe.schedule import Schedule
from support.oracles import clock
from support.problems import pipeline, stage

FORWARD, BACKWARD = 10.0, 20.0
NOISE = 0.002  # of an op's time
FAULTS = ("none", "far-ops", "slow-device", "replicas", "micro-batches", "stages", "messages", "order")


class Job(NamedTuple):
    devices: int
    microbatches: int
    replicas: int
    steps: int
    fault: str
    factor: float
    place: int  # the stage or the device, or where the fault begins
    replica: int
    since: int
    seed: int


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    devices, steps = draw(st.integers(2, 5)), draw(st.integers(6, 9))
    replicas = draw(st.integers(2, 4))
    return Job(
        devices,
        draw(st.integers(2 * devices, 4 * devices)),
        replicas,
        steps,
        draw(st.sampled_from(FAULTS)),
        draw(st.floats(1.4, 2.5)),
        draw(st.integers(0, devices - 1)),
        draw(st.integers(0, replicas - 1)),
        draw(st.integers(0, steps - 4)),
        draw(st.integers(0, 2**31)),
    )


def recorded(job: Job) -> Recording:
    """What ran, as our other simulator times it. Clocks of devices differ."""
    random = np.random.default_rng(job.seed)
    ahead = random.uniform(-500, 500, job.devices)
    p2p_ms = 5.0 * (job.factor - 1) if job.fault == "messages" else 0.05
    order = megatron.order(job.devices, 1, megatron.in_groups(job.microbatches, 1))
    if job.fault == "order":  # one micro-batch at a time
        each = [(kind, j) for j in range(job.microbatches) for kind in (Kind.F, Kind.BW)]
        order = [[Op(kind, d, j) for kind, j in each] for d in range(job.devices)]
    problem = pipeline(job.devices, job.microbatches, 10**9, stage())
    schedule = Schedule(problem, tuple(map(Program.from_items, order)))
    ops = []
    for step in range(job.steps):
        for replica in range(job.replicas):
            ms = _times(job, step, replica, random)
            ran = clock.run(
                schedule.problem,
                schedule,
                lambda op, ms=ms: float(ms[op.stage, int(op.kind is Kind.BW), op.microbatch]),
                lambda op: p2p_ms,
            )
            for op, start in ran.start.items():
                begin = 1e5 * step + start + ahead[op.stage]
                ops.append(MeasuredOp(op, op.stage, step, ran.end[op] - start, begin, op.stage, replica))
    return Recording(ops)


def _times(job: Job, step: int, replica: int, random: np.random.Generator) -> NDArray[np.float64]:
    """(stages, 2, micro-batches) of a run: forwards and backwards."""
    ms = np.array([FORWARD, BACKWARD])[None, :, None] * np.ones((job.devices, 1, job.microbatches))
    if job.fault == "stages":
        ms[job.place] *= job.factor
    if "slow-device" in job.fault and replica == job.replica and step >= job.since:
        ms[job.place] *= job.factor
    if job.fault == "first-forward":
        ms[0, 0, 0] *= 5
    if "far-ops" in job.fault and (step, replica) == (job.since, job.replica):
        ms[job.place, job.seed % 2, job.seed % job.microbatches] *= 3 * job.factor
    if job.fault == "replicas":
        ms *= 1 + (job.factor - 1) * ((replica + step) % job.replicas == 0)
    if job.fault == "micro-batches":
        lengths = np.linspace(2 - job.factor / 2.6, job.factor / 2.6, job.microbatches)
        ms *= random.permutation(lengths)
    return ms * (1 + NOISE * random.standard_normal(ms.shape))
