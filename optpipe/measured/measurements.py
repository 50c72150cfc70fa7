"""What measurements become: `Measurements`, a problem with the spreads of its times, and what they do not say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any, NamedTuple, Self

from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule, ScheduleFile


@dataclass(frozen=True, order=True)
class MeasuredTimes:
    """Median and interquartile range of `count` times, in ms."""

    ms: float
    iqr_ms: float
    count: int

    @classmethod
    def from_samples(cls, times: Sequence[float]) -> Self:
        low, _, high = quantiles(times, n=4, method="inclusive") if len(times) > 1 else (times[0],) * 3
        return cls(round(median(times), 4), round(high - low, 4), len(times))


@dataclass(frozen=True)
class Measurements:
    """A problem made of measurements.

    Attributes
    ----------
    problem
        It holds the medians, or of one step each micro-batch's own times.
    stages
        For each stage the times of its F, B, W or BW.
    message
        The times of messages; None where they are not known.
    unknown
        What the measurements do not say, and what the problem has instead, one sentence each.
    unused
        What was measured or given and is not in the problem, and why, one sentence each: steps, figures, the order.
    schedule
        What ran: the order of the last whole step, or of the one that was asked for; None where it is not known, which
        `unused` gives the reason for.
    measured_ms
        From the first start to the last end of a step, the median of all steps; None where it is not known.
    """

    problem: Problem
    stages: tuple[Mapping[Kind, MeasuredTimes], ...]
    message: MeasuredTimes | None
    unknown: tuple[str, ...]
    unused: tuple[str, ...]
    schedule: Schedule | None
    measured_ms: float | None

    @property
    def replayed_ms(self) -> float | None:
        """How long `schedule` takes by the problem's times."""
        return None if self.schedule is None else self.schedule.makespan_ms

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON has it; the schedule as its file has it."""
        return {
            "problem": self.problem.to_dict(),
            "stages": [{kind.name: asdict(spread) for kind, spread in times.items()} for times in self.stages],
            "message": self.message and asdict(self.message),
            "measured_ms": self.measured_ms,
            "replayed_ms": self.replayed_ms,
            "unknown": list(self.unknown),
            "unused": list(self.unused),
            "schedule": self.schedule
            and ScheduleFile.from_schedule(self.schedule).model_dump(mode="json", exclude_none=True),
        }


class ProblemOptions(NamedTuple):
    """What a user says of the problem beside the measurements; None where nothing. See `problem_from`."""

    activation_bytes: Sequence[int] | None = None
    activation_budget_bytes: int | None = None
    weight_share: float | None = None
    step: int | None = None
    replica: int | None = None


def unknown_sentences(
    times: Sequence[Mapping[Kind, Any]],
    message: MeasuredTimes | None,
    ordered: bool,
    devices: int,
    options: ProblemOptions,
) -> list[str]:
    """What the measurements do not say, and what the problem has instead."""
    sentences = []
    if options.activation_bytes is None:
        sentences.append("the bytes of activations: each counts as 1 byte; give --activation-bytes")
    sentences.append("what stays saved from B until W: the whole activation; edit saved_for_weight_bytes")
    if options.activation_budget_bytes is None:
        sentences.append(
            f"the activation budget: {'what the measured order holds' if ordered else 'no limit'}; "
            "give --activation-budget-bytes"
        )
    if options.weight_share is None and any(Kind.W not in each for each in times):
        sentences.append(
            "how a backward divides into B and W: all of it is B, so a split gains nothing; give --weight-share"
        )
    if message is None and devices > 1:
        sentences.append("the time of messages: 0; edit p2p_ms")
    sentences.append(
        "offloading and recomputing: impossible; add offload_ms, reload_ms, offload_bytes, or recompute_ms, ..."
    )
    return sentences
