"""The whole training steps of a recording, and what their times say of messages, of clocks and of the order of ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from optpipe.measured.messages import clocks_ahead, gaps
from optpipe.measured.recording import MeasuredOp
from optpipe.model.ops import Op

Step = Sequence[MeasuredOp]
Order = tuple[tuple[Op, ...], ...]  # by device


@dataclass(frozen=True, eq=False)
class TrainingSteps:
    """Whole training steps of one replica."""

    steps: tuple[Step, ...]  # micro-batches numbered from 0 in each
    microbatches: int
    where: tuple[int, ...]  # by stage: its device
    unused: tuple[str, ...]  # what was left out, and why, one sentence each

    @property
    def devices(self) -> int:
        return 1 + max(self.where)

    @property
    def ops(self) -> list[MeasuredOp]:
        return [each for step in self.steps for each in step]

    @cached_property
    def are_timed(self) -> bool:
        """Whether all starts were measured."""
        return all(each.start_ms is not None for each in self.ops)

    @property
    def messages_ms(self) -> list[list[float]]:
        """By step, how long messages between neighbour stages took."""
        return [[max(0.0, gap.message_ms) for gap in gaps([step]) if not gap.same_device] for step in self.steps]

    @cached_property
    def ahead_ms(self) -> dict[int, float]:
        """By device, how far its clock is ahead (`clocks_ahead`): of all devices where all starts were measured, since
        each stage of a whole step has messages with the next one."""
        return clocks_ahead(self.steps, self.where)

    @property
    def spans_ms(self) -> list[float]:
        """Of each step whose starts were measured, from the first start to the last end over all devices, by the clock
        of stage 0's device."""
        ahead = self.ahead_ms
        return [
            max(each.end_ms - ahead[each.device] for each in step)
            - min((each.start_ms or 0.0) - ahead[each.device] for each in step)
            for step in self.steps
        ]

    def order_of(self, step: Step) -> Order:
        """By device, the ops of a step in the order in which they began."""
        ops: list[list[Op]] = [[] for _ in range(self.devices)]
        for each in sorted(step, key=lambda each: (each.start_ms or 0.0, each.end_ms)):
            ops[each.device].append(each.op)
        return tuple(map(tuple, ops))

    @property
    def overlap(self) -> str | None:
        """A sentence about two ops of a device in the last step, one of which began before the other was half over."""
        last: dict[int, MeasuredOp] = {}
        for each in sorted(self.steps[-1], key=lambda each: each.start_ms or 0.0):
            before = last.get(each.device)
            if before and each.start_ms is not None and before.end_ms - each.start_ms > max(before.ms, each.ms) / 2 > 0:
                return (
                    f"that ops ran beside each other, such as {before.op} and {each.op}: each counts with its whole "
                    "time, one after the other"
                )
            last[each.device] = each
        return None
