"""What ran, as arrays: each whole training step of each replica is a run, with its own op times, its own messages and
the order in which its ops ran."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from optpipe.evaluate.timeline import timed_samples
from optpipe.model.arrays import Floats, Ints
from optpipe.schedule import Schedule

ACTIVATION = 720720  # bytes that stand for one activation of a stage: up to 15 chunks divide it


@dataclass(frozen=True, eq=False)
class Runs:
    """Steps of replicas, each a run, (K,); their ops, run after run, (T,), as the run's order has them.

    Attributes
    ----------
    orders
        The different orders in which they ran, as schedules of a problem whose ops all take 1 ms.
    order, step, replica
        (K,) of each run.
    measured_ms
        (K,) from its first start to its last end; NaN where clocks do not tell.
    message_ms
        (K,) how long a message took.
    begins
        (K + 1,) where each run's ops begin.
    kind, stage, microbatch, device, ms
        (T,) of each op.
    handover_ms
        (D,) what passes on a device from the end of an op to the start of the next one, though that one could run.
    where
        By stage: its device.
    unused
        What was not used, and why, one sentence each.
    assumed
        What the files do not say, and is taken to be so, one sentence each.
    """

    orders: tuple[Schedule, ...]
    order: Ints
    step: Ints
    replica: Ints
    measured_ms: Floats
    message_ms: Floats
    begins: Ints
    kind: Ints
    stage: Ints
    microbatch: Ints
    device: Ints
    ms: Floats
    handover_ms: Floats
    where: tuple[int, ...]
    unused: tuple[str, ...]
    assumed: tuple[str, ...]

    @cached_property
    def run(self) -> Ints:
        """(T,) the run of each op."""
        return np.repeat(np.arange(len(self.step)), np.diff(self.begins))

    @cached_property
    def steps(self) -> Ints:
        """(N,) the numbers of the steps."""
        return np.unique(self.step)

    @cached_property
    def replicas(self) -> Ints:
        return np.unique(self.replica)

    @property
    def devices(self) -> int:
        return 1 + max(self.where)

    def ops_of(self, run: int) -> slice:
        return slice(int(self.begins[run]), int(self.begins[run + 1]))

    def runs_of(self, step: int) -> Ints:
        """The runs of a step: one a replica."""
        return np.flatnonzero(self.step == step)

    def longest(self, lengths_ms: Floats) -> Floats:
        """(N,) of each step the slowest replica's length; `lengths_ms` is (K,)."""
        longest = np.full(len(self.steps), -np.inf)
        np.maximum.at(longest, np.searchsorted(self.steps, self.step), lengths_ms)
        return longest

    def replay(self, ms: Floats | None = None, with_messages: bool = True) -> tuple[Floats, Floats, Floats]:
        """Each run again, its ops as early as its order, its messages and its hand-overs allow.

        Parameters
        ----------
        ms
            (T,) times of the ops instead of their own.
        with_messages
            Whether messages and hand-overs take their times, or none.

        Returns
        -------
        tuple
            (K,) the lengths, and (T,) the start and the end of each op.
        """
        ms = self.ms if ms is None else ms
        handover = self.handover_ms * with_messages
        starts, ends = np.empty_like(ms), np.empty_like(ms)
        for number, schedule in enumerate(self.orders):
            runs = np.flatnonzero(self.order == number)
            compiled = schedule.compiled
            device, (waits, unit) = compiled.rows.device, compiled.waits
            ops = self.begins[runs] + np.arange(len(device))[:, None]
            sender = handover[np.where(waits >= 0, device[waits], 0)]
            delay = np.maximum(0.0, self.message_ms[runs] * with_messages - sender[:, :, None]) * (unit > 0)[:, :, None]
            lasts = ms[ops] + handover[device][:, None]
            start, end = timed_samples(compiled.rows, waits, delay, lasts)
            starts[ops], ends[ops] = start, end - handover[device][:, None]
        lengths = np.full(len(self.step), -np.inf)
        np.maximum.at(lengths, self.run, ends)
        return lengths, starts, ends
