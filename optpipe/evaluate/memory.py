"""The certificate: the exact peak of device and host memory, by a prefix scan over each program.

Memory is a property of the programs: what ops take and free (`optpipe.evaluate.effects`) adds up in program order,
whatever the clock does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optpipe.evaluate.effects import RowEffects
from optpipe.evaluate.rows import Rows
from optpipe.model.arrays import Ints
from optpipe.model.problem import Problem
from optpipe.text import distinct_sizes


@dataclass(frozen=True)
class Peak:
    """The most bytes that a device, or its share of host memory, holds."""

    bytes: int
    at: str  # the op during which it does
    limit: int | None  # what it may hold; None where nothing limits it

    @property
    def fits(self) -> bool:
        return self.limit is None or self.bytes <= self.limit


@dataclass(frozen=True)
class Certificate:
    """The peaks of every device, by the order of its program alone.

    Attributes
    ----------
    device
        By device: the peak of its memory in bytes, the op at which it is reached, and the limit.
    host
        By device: the same for the pinned host memory that it uses.
    """

    device: tuple[Peak, ...]
    host: tuple[Peak, ...]

    @property
    def fits(self) -> bool:
        return not self.complaints()

    def complaints(self) -> list[str]:
        """A sentence for each device that needs more than it has."""
        return [
            f"device {d} needs {needed}{of} during {peak.at} and has {limit}"
            for of, peaks in (("", self.device), (" of host memory", self.host))
            for d, peak in enumerate(peaks)
            if not peak.fits
            for needed, limit in [distinct_sizes(peak.bytes, peak.limit or 0)]
        ]


def held_during(taken: Ints, freed: Ints, begins: Ints | None = None) -> Ints:
    """The prefix scan: the bytes held during each op. What an op takes counts from its start, what it frees until its
    end.

    Parameters
    ----------
    taken, freed
        (n,) bytes of each op, in program order.
    begins
        (D + 1,) where the program of each device begins; by default there is one program.
    """
    held: Ints = np.cumsum(taken - freed)
    if begins is not None:
        before = np.concatenate(([0], held))[begins[:-1]]  # what the programs above left
        held -= np.repeat(before, np.diff(begins))
    return held + freed


@dataclass(frozen=True, eq=False)
class Held:
    """The bytes that are held during each op and after it, (n,) each."""

    during: Ints
    after: Ints  # the ops of a pair may share their bytes in any way: the first has after it what the pair holds
    on_host: Ints  # during each op

    @classmethod
    def scan(cls, effects: RowEffects, rows: Rows, devices: int) -> Held:
        begins = rows.begins(devices)
        during = held_during(effects.takes, effects.frees, begins)
        after = during - effects.frees
        after[rows.first] = during[rows.first + 1] = during[rows.first]
        return cls(during, after, held_during(effects.takes_on_host, effects.frees_on_host, begins))


def certificate(problem: Problem, rows: Rows, held: Held) -> Certificate:
    """The peaks of all devices and of their host memory."""
    begins = rows.begins(len(problem.devices)).tolist()
    on_device, on_host = [], []
    for device, begin, end in zip(problem.devices, begins, begins[1:], strict=False):
        on_device.append(_peak(rows, held.during, begin, end, device.activation_budget_bytes))
        on_host.append(_peak(rows, held.on_host, begin, end, device.host_memory_bytes))
    return Certificate(tuple(on_device), tuple(on_host))


def _peak(rows: Rows, during: Ints, begin: int, end: int, limit: int | None) -> Peak:
    if begin == end:
        return Peak(0, "no op", limit)
    row = begin + int(np.argmax(during[begin:end]))
    return Peak(int(during[row]), str(rows.op(row)), limit)
