"""Chronos-Pipe's formulas (Lin et al. 2025), beside the schedules of `optpipe_solver.systems.chronos`."""

from __future__ import annotations

import numpy as np

from optpipe.errors import InputError
from optpipe.evaluate.objective import reaches
from optpipe.lift import with_host_updates
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_solver.systems.system import count_devices


def units_with_messages(devices: int, microbatches: int, message: float, chunks: int = 2) -> float:
    """The units that an iteration takes where a message of `message` units keeps both devices busy (section 4.1).

    Chronos-Pipe's with two chunks a device; with one, 1F1B's. Raises InputError for other chunks, and for fewer than
    two devices or micro-batches, which the formulas do not cover.
    """
    if chunks not in (1, 2) or min(devices, microbatches) < 2:
        given = f"devices = {devices}, microbatches = {microbatches}, chunks = {chunks}"
        raise InputError(f"{given}: section 4.1 is for 2 or more devices and micro-batches, and for 1 or 2 chunks")
    sent = chunks * (2 * devices + 4 * (microbatches - 2)) + 2 * (chunks - 1)
    return 6 * (microbatches + devices - 1) + sent * message


def bubble_share(devices: int, microbatches: int, message: float, chunks: int = 2) -> float:
    """The share of `units_with_messages` in which a device does not compute (section 4.1), from 0 to 1."""
    return 1 - 6 * microbatches / units_with_messages(devices, microbatches, message, chunks)


def idle_before_shallow(devices: int, backward_ms: float) -> float:
    """How long (ms) a device of Chronos-Pipe with two chunks is idle before the last backwards of chunk 1 (Eq. 4).

    `backward_ms` is a micro-batch's backward through all 2p chunks.
    """
    return (devices - -(-(2 * devices - 3) // 6) - 1) * backward_ms / (2 * devices)


def idle_before_deep(devices: int, forward_ms: float) -> float:
    """How long (ms) it is idle before the first forwards of chunk 2 (Eq. 6).

    `forward_ms` is a micro-batch's forward through all 2p chunks.
    """
    return (devices - -(-(devices - 3) // 6) - 1) * forward_ms / (2 * devices)


def fits_in_bubbles(problem: Problem) -> bool:
    """Whether host optimizers fit into what Chronos-Pipe with two chunks a device leaves idle (Eq. 5 and 7).

    Of stages with different times the longest transfers count. Sufficient for `overlap` to be 1 where stages are alike,
    not necessary. Raises InputError for other numbers of chunks.
    """
    p, ms = count_devices(problem), problem.costs.ms
    if len(problem.stages) != 2 * p:
        raise InputError(f"stages: Eq. 5 and 7 are for 2 a device; here are {len(problem.stages)} on {p} devices")
    step, upload = float(ms[[Kind.G, Kind.U]].sum(axis=0).max()), float(ms[Kind.P].max())
    backward, forward = (float(ms[kind].sum(axis=0).min()) for kind in (Kind.BW, Kind.F))
    return reaches(step, idle_before_shallow(p, backward)) and reaches(upload, idle_before_deep(p, forward))


def overlap(schedule: Schedule) -> float:
    """The share of the host optimizers' time that hides behind compute: 1 at most, below 0 where offloads, or another
    device's transfers on a shared link, wait for theirs.

    What the iteration is longer by than without them, against the longest G and U and the longest P of a device.
    Raises InputError for a schedule without host optimizers.
    """
    timeline = schedule.timeline
    lasts = np.zeros((len(Kind), len(schedule.problem.devices)))
    np.add.at(lasts, (timeline.rows.kind, timeline.device), timeline.end - timeline.start)
    longest = lasts[[Kind.G, Kind.U]].sum(axis=0).max() + lasts[Kind.P].max()
    if not longest:
        raise InputError("programs: no optimizer runs on the host (G, U, P), or none takes any time")
    return float(1 - (schedule.makespan_ms - with_host_updates(schedule, ()).makespan_ms) / longest)
