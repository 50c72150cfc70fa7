"""What offloading costs and how good predictions are, on one GPU and in one process.

The same GPT runs twice: all of its stages on this device, and one of them between emulated neighbours, each with
everything kept and with half of every activation offloaded. The same code runs on CPU; what only CUDA can show is then
reported as not measured. There is one row for each requirement, with its verdict.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from benchmarks.gpu.runs import COUNTERS, GpuMeasurements, GpuSetup, Steps
from benchmarks.gpu.schedules import share_offloaded
from optpipe.model.ops import COMPUTE, Kind
from optpipe.show.lanes import blocks

NOT_MEASURED = "not measured"
Unit = Literal["ms", "%", ""]
WORKSPACE = 0.05  # of the certified peak: messages under way, and results that wait for a neighbour


@dataclass(frozen=True)
class Target:
    """One figure and its limit. `reached` is None if this device cannot show it; that is neither a pass nor a
    failure."""

    what: str
    asked: Literal["at least", "at most"]
    limit: float
    reached: float | None
    unit: Unit = ""  # if "%", limit and reached are shares

    @property
    def passed(self) -> bool | None:
        if self.reached is None:
            return None
        return self.reached >= self.limit if self.asked == "at least" else self.reached <= self.limit  # false for NaN

    @property
    def verdict(self) -> str:
        return NOT_MEASURED if self.passed is None else "pass" if self.passed else "FAIL"

    def text(self, value: float | None) -> str:
        if value is None:
            return "–"
        return f"{value:.1%}" if self.unit == "%" else f"{value:.4g} {self.unit}".rstrip()


@dataclass(frozen=True)
class Report:
    """All rows of one run, and further figures by name."""

    device: str
    torch: str
    rows: tuple[Target, ...]
    figures: dict[str, float]

    @property
    def passed(self) -> bool:
        """Whether no row failed. A row that was not measured has not failed."""
        return all(row.passed is not False for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        rows = [asdict(row) | {"verdict": row.verdict} for row in self.rows]
        return asdict(self) | {"passed": self.passed, "rows": rows}


def judge(setup: GpuSetup, measured: GpuMeasurements) -> Report:
    """Compares what is required with what was measured."""
    cuda = setup.device.type == "cuda"
    rows = (*_inside(measured), *_copies(measured), *_stage(setup, measured), *_memory(measured, cuda))
    return Report(
        device=torch.cuda.get_device_name(setup.device) if cuda else "CPU",
        torch=str(torch.__version__),
        rows=rows,
        figures=_figures(measured),
    )


def _inside(measured: GpuMeasurements) -> tuple[Target, ...]:
    """All stages in one process: offloading compared with keeping."""
    keeps, halves = measured.inside
    certified, fell = keeps.certified_bytes - halves.certified_bytes, keeps.peak_bytes - halves.peak_bytes
    return (
        Target("shortest F of a stage", "at least", 10.0, float(measured.problem.costs.ms[Kind.F].min()), "ms"),
        Target("activation bytes that leave", "at least", 0.45, share_offloaded(halves.schedule), "%"),
        Target("longer iteration with them offloaded", "at most", 0.05, halves.ms / keeps.ms - 1, "%"),
        Target("peak falls, of what is certified", "at least", 0.95, fell / certified if certified > 0 else 0.0, "%"),
        Target("gradients that differ", "at most", 0, measured.differing),
    )


def _copies(measured: GpuMeasurements) -> tuple[Target, ...]:
    """Offloads and reloads of stage 0, with nothing beside them, compared with one plain copy of as many bytes."""
    return tuple(
        Target(f"{what}, of a plain copy's rate", "at least", 0.85, plain / _copy_ms(measured, kind), "%")
        for what, kind, plain in zip(("offload", "reload"), (Kind.O, Kind.R), measured.plain_ms, strict=True)
    )


def _stage(setup: GpuSetup, measured: GpuMeasurements) -> tuple[Target, ...]:
    """One stage between emulated neighbours: its span compared with the predicted one."""
    return tuple(
        Target(
            f"span of stage {setup.emulated}/{setup.stages} off the predicted, {steps.schedule.method}",
            "at most",
            0.05,
            off,
            "%",
        )
        for steps in measured.stage
        for off in [abs(steps.span_ms / predicted_span(steps) - 1)]
    )


def predicted_span(steps: Steps) -> float:
    """From the start of the device's first compute op to the end of its last, in ms, by `simulate`."""
    own = [each for each in blocks(steps.schedule) if each.device == steps.device and each.op.kind in COMPUTE]
    return max(each.end for each in own) - min(each.start for each in own)


def _copy_ms(measured: GpuMeasurements, kind: Kind) -> float:
    return sum(measured.copies.op_ms(kind, 0, part) for part in range(len(measured.part_bytes)))


def _figures(measured: GpuMeasurements) -> dict[str, float]:
    """Further figures, predicted and measured, in ms; and rates of copies in GB/s."""
    nbytes = sum(measured.part_bytes)
    figures: dict[str, float] = {}
    for names, pair in (("all stages", measured.inside), ("stage", measured.stage)):
        for steps in pair:
            figures[f"{names}, {steps.schedule.method}: predicted ms"] = predicted_span(steps)
            figures[f"{names}, {steps.schedule.method}: measured ms"] = steps.span_ms
            figures[f"{names}, {steps.schedule.method}: certified bytes"] = steps.certified_bytes
            figures[f"{names}, {steps.schedule.method}: peak bytes"] = steps.peak_bytes
    figures["offload GB/s"] = nbytes / _copy_ms(measured, Kind.O) / 1e6
    figures["reload GB/s"] = nbytes / _copy_ms(measured, Kind.R) / 1e6
    figures["plain copy to the host GB/s"], figures["plain copy back GB/s"] = (
        nbytes / ms / 1e6 for ms in measured.plain_ms
    )
    figures["emulated messages late by ms"] = measured.late_ms
    return figures


def _memory(measured: GpuMeasurements, cuda: bool) -> tuple[Target, ...]:
    """Over all steps: what was held after every op compared with the certificates, and whether the allocator asked the
    driver for memory."""
    runs = (*measured.inside, measured.copies, *measured.stage)
    times = [(steps, time) for steps in runs for report in steps.reports for time in report.trace]
    held = max((time.held_bytes - time.certified_bytes) / steps.certified_bytes for steps, time in times)
    above = [
        (time.allocated_bytes - steps.base_bytes - time.certified_bytes) / steps.certified_bytes
        for steps, time in times
        if time.allocated_bytes is not None and steps.base_bytes is not None
    ]
    return (
        Target("activations above the certificate, of its peak", "at most", 0.0, held, "%"),
        Target("memory_allocated above it, of its peak", "at most", WORKSPACE, max(above, default=None), "%"),
        *(
            Target(f"{name} in steady state", "at most", 0, sum(s.allocations[name] for s in runs) if cuda else None)
            for name in COUNTERS
        ),
    )
