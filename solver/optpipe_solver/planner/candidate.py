"""`Candidate`: one way to train the model, with its bound and its best schedule; and how sure it is that one is faster
than another (`difference`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import log, sqrt
from statistics import mean
from typing import NamedTuple

from optpipe.evaluate.effects import Peak
from optpipe.evaluate.objective import NO_SCHEDULE_MS, shorter
from optpipe.formats.stacks import STACKS, Stack, with_whole_backwards
from optpipe.formats.torch_memory import whole_backwards
from optpipe.model.arrays import Floats
from optpipe.model.ops import Kind
from optpipe.model.placement import NAMES, devices_in_order, folded, on_devices
from optpipe.model.problem import Problem
from optpipe.model.program import of_kinds
from optpipe.model.records import one_for_all
from optpipe.schedule import Schedule
from optpipe.transformer.calibrate import UNEXPLAINED, gradient, ratio_variances
from optpipe.transformer.estimate import MEASURED_PEAKS, Estimate
from optpipe.transformer.gpu import Gpu
from optpipe.transformer.iterations import simulate
from optpipe_solver.bounds.least_memory import least_memory

WHOLE = " with whole backwards"  # of a method that splits them elsewhere
ROOMY = 2**50  # bytes, more than any GPU needs
PARTS = {
    "matmuls": "matmuls",
    "attention": "attention",
    "passes": "norms, losses and the like",
    "host": "the host, by kernels",
    "messages": "messages within stages",
    "recomputing": "recomputing",
}


@dataclass(eq=False)
class Candidate:
    """One way to train the model. Times are those of an iteration, in ms.

    Attributes
    ----------
    runs
        What the training stack can run.
    bound_ms
        No iteration without evictions is shorter; `NO_SCHEDULE_MS` if memory admits none. By default `work_ms`.
    schedule
        The best one so far; None also where only a formula has the shortest iteration.
    start
        The best one that evicts nothing: where a search may begin, which is of `problem`.
    lengths
        By method: the shortest iteration with a schedule that fits, and the most that a GPU then holds, in bytes.
    """

    estimate: Estimate
    runs: Stack = STACKS["optpipe"]
    bound_ms: float = 0.0
    schedule: Schedule | None = None
    start: Schedule | None = None
    lengths: dict[str, tuple[float, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bound_ms = self.bound_ms or self.work_ms

    @property
    def work_ms(self) -> float:
        """The busiest device has all its work to do, but for all-to-all in pairs, then gradients and weights."""
        estimate = self.estimate
        return self.with_step_end(estimate.run.microbatches * max(estimate.busy_ms) * (1 - estimate.most_hidden))

    def with_step_end(self, makespan_ms: float) -> float:
        """The iteration of so long a schedule: after it gradients are reduced and weights updated."""
        return makespan_ms + self.estimate.after_ms

    @property
    def method(self) -> str | None:
        """That of the shortest iteration so far; None if nothing is known to fit."""
        return min(self.lengths, key=lambda method: self.lengths[method], default=None)

    @property
    def iteration_ms(self) -> float:
        """The shortest one so far; `NO_SCHEDULE_MS` if nothing is known to fit."""
        return self.lengths[self.method][0] if self.method else NO_SCHEDULE_MS

    @property
    def least_ms(self) -> float:
        """The iteration if something fits, else the bound."""
        return self.iteration_ms if self.method else self.bound_ms

    @property
    def division(self) -> tuple[int, ...]:
        """The degrees of parallelism: tp, pp, dp, ep, cp."""
        degrees = self.estimate.parallelism
        return degrees.tp, degrees.pp, degrees.dp, degrees.ep, degrees.cp

    @property
    def state_bytes(self) -> int:
        """What the fullest GPU holds without any activation."""
        return self.estimate.gpu.memory_bytes - min(memory.budget for memory in self.estimate.devices)

    @property
    def needed_bytes(self) -> int:
        """What the fullest GPU needs for one micro-batch at a time, however it is relieved."""
        ample = self.estimate.with_memory(ROOMY)
        least = zip(least_memory(self._posed(ample.problem)), ample.devices, strict=True)
        return max(ROOMY - memory.budget + activations for activations, memory in least)

    @property
    def may_fit(self) -> bool:
        """Whether there is room beside the state; without relief also for a micro-batch on every device. It is no proof
        that a schedule fits."""
        relieved = self.runs.kinds & {Kind.O, Kind.C} or self.runs.offloads_modules
        return all(
            memory.budget > (0 if relieved else held)
            for held, memory in zip(self._activation_bytes, self.estimate.devices, strict=True)
        )

    @property
    def _activation_bytes(self) -> list[int]:
        """What each device saves of a micro-batch."""
        held = [0] * self.estimate.parallelism.pp
        for device, pieces in zip(self.estimate.order, self.estimate.stages, strict=True):
            held[device] += sum(one_for_all(self.estimate.layers[i].activation_bytes) for i in pieces)
        return held

    @property
    def has_formula(self) -> bool:
        """Whether `looped` is for it: stages are looped, and with chunks pp divides the micro-batches."""
        division, run = self.estimate.parallelism, self.estimate.run
        return division.shape == "looped" and (division.chunks == 1 or run.microbatches % division.pp == 0)

    def looped(self, away: Sequence[float] = ()) -> tuple[float, int]:
        """The iteration of 1F1B, interleaved with chunks, and what its fullest GPU holds in bytes, without a schedule,
        as if of each piece so many bytes of a micro-batch were always away."""
        ms, peaks = simulate(self.estimate, away)
        held = (peak - memory.budget for peak, memory in zip(peaks, self.estimate.devices, strict=True))
        return ms, self.estimate.gpu.memory_bytes + round(max(held))

    @property
    def parts_ms(self) -> dict[str, float]:
        """Where the iteration goes, in ms that add up to it.

        Those of `PARTS` are means over devices; `uneven stages` is how much longer the busiest device computes,
        `waiting` how long it does not; without a schedule, what the bound says of it.
        """
        estimate, m = self.estimate, self.estimate.run.microbatches
        busy = estimate.busy_ms
        longest = max(busy)
        parts = {title: m * mean(getattr(ms, field) for ms in estimate.device_times) for field, title in PARTS.items()}
        again = 0.0  # what the schedule recomputes beside, less what its pairs hide
        if self.schedule:
            device = devices_in_order(self.schedule.problem)[busy.index(longest)]
            again = self.schedule.timeline.busy_ms()[device] - m * longest
        parts[PARTS["messages"] if again < 0 else "recomputing"] += again
        return parts | {
            "uneven stages": m * (longest - mean(busy)),
            "waiting": max(self.least_ms, self.work_ms) - estimate.after_ms - m * longest - again,
            "reducing gradients": estimate.after_ms - estimate.optimizer_ms,
            "the optimizer": estimate.optimizer_ms,
        }

    @property
    def has_whole_backwards(self) -> bool:
        """Whether no backward may be split: in PyTorch's pipelining replicas then lose gradients, in DDP and where FSDP
        has parts of a stage, and what is recomputed is computed again for each weight."""
        degrees, run = self.estimate.parallelism, self.estimate.run
        return self.runs.keeps_until_weight and (degrees.dp * degrees.cp > 1 or run.recompute != "none")

    @cached_property
    def problem(self) -> Problem:
        """What is to be scheduled. Raises InputError if a device has no room for activations."""
        return self._posed(self.estimate.problem)

    @cached_property
    def evicting(self) -> Problem:
        """The problem where stage s may evict to the device of stage p - 1 - s, as BPipe does (Kim et al. 2023).

        Where nodes have several devices, those of each pair are in one node, and an eviction crosses its links; else it
        crosses those between stages. Where devices have several stages, nothing is evicted.
        """
        p = self.estimate.parallelism.pp
        if self.estimate.parallelism.chunks > 1:
            return self.problem
        peers = [p - 1 - d if p - 1 - d != d else None for d in range(p)]
        links, near, stages = self.estimate.clock.links, self.estimate.clock.links.devices_per_node, []
        for stage in self.problem.stages:
            size = one_for_all(stage.activation_bytes)
            ms = links.transfer_ms(size) if near % 2 else links.ring_ms(size, 2, 1, 1)
            eviction = {"evict_ms": ms, "load_ms": ms, "evict_bytes": stage.activation_bytes}
            stages.append(stage.model_copy(update=eviction if peers[stage.device] is not None else {}))
        pairs = zip(self.problem.devices, peers, strict=True)
        problem = self.problem.replace(
            devices=tuple(device.model_copy(update={"peer": peer}) for device, peer in pairs), stages=tuple(stages)
        )
        return problem if near % 2 else on_devices(problem, folded([d // near for d in range(p)]))

    def _posed(self, problem: Problem) -> Problem:
        """The problem of which every schedule is one for the stack."""
        allowed = self.runs.restrict(problem, self.estimate.torch_factor)
        return with_whole_backwards(allowed) if self.has_whole_backwards else allowed

    def as_run(self, schedule: Schedule) -> Schedule:
        """The schedule, with whole backwards where none may be split."""
        if not self.has_whole_backwards:
            return schedule
        problem = self.runs.restrict(self.estimate.problem, self.estimate.torch_factor)
        split = any(of_kinds(program.table, Kind.W).any() for program in schedule.programs)
        method = f"{schedule.method}{WHOLE}" if split else schedule.method
        return replace(whole_backwards(schedule).on(problem), method=method)

    def used_bytes(self, schedule: Schedule) -> list[int]:
        """What each GPU holds at its fullest, state, workspace and reserve included."""
        whole = self.estimate.gpu.memory_bytes
        peaks = zip(self.peaks(schedule), self.estimate.devices, strict=True)
        return [whole - memory.budget + peak.bytes for peak, memory in peaks]

    def peaks(self, schedule: Schedule) -> list[Peak]:
        """Those of the devices, in the order in which stages pass them."""
        return [schedule.compiled.certificate.device[d] for d in devices_in_order(schedule.problem)]

    def peak_ranges(self, schedule: Schedule) -> list[tuple[int, int]]:
        """The least and the most that each GPU may hold, with fragments and buffers as they were measured elsewhere."""
        reserved = self.estimate.gpu.reserved_bytes
        least, most = MEASURED_PEAKS
        sums = [used - reserved for used in self.used_bytes(schedule)]
        return [(reserved + round(least * each), reserved + round(most * each)) for each in sums]

    def take(self, schedule: Schedule) -> bool:
        """Keep what fits. Returns whether it is the best so far."""
        schedule = self.as_run(schedule)
        if schedule.compiled.complaints:
            return False
        better = self.with_step_end(schedule.makespan_ms) < self.iteration_ms
        point = self.with_step_end(schedule.makespan_ms), max(self.used_bytes(schedule))
        self.lengths[schedule.method] = min(self.lengths.get(schedule.method, point), point)
        if better:
            self.schedule = schedule
        evicts = any(stage.can_evict for stage in schedule.problem.stages)
        same = len(schedule.problem.stages) == self.estimate.parallelism.stages  # not layers as stages
        if same and not evicts and (self.start is None or shorter(schedule.makespan_ms, self.start.makespan_ms)):
            self.start = schedule.on(self.problem)
        return better

    def __str__(self) -> str:
        """Text such as `tp 8, pp 4, dp 2, 2 chunks V-shaped, 64 × 1 sequences, recompute cheap`."""
        parallelism, run = self.estimate.parallelism, self.estimate.run
        words = [f"tp {parallelism.tp}", f"pp {parallelism.pp}", f"dp {parallelism.dp}"]
        words += [f"cp {parallelism.cp}"] if parallelism.cp > 1 else []
        words += [f"ep {parallelism.ep}"] if parallelism.ep > 1 else []
        words += [f"etp {parallelism.etp}"] if parallelism.etp else []
        usual = parallelism.dp * parallelism.cp > 1  # ZeRO 1 with replicas
        words += [f"ZeRO {parallelism.zero}"] if parallelism.zero != usual else []
        words += [f"{parallelism.chunks} chunks {NAMES[parallelism.shape]}"] if parallelism.chunks > 1 else []
        words += [f"{run.microbatches} × {run.microbatch_size} sequence{'s' * (run.microbatch_size > 1)}"]
        words += [f"recompute {run.recompute}"] if run.recompute != "none" else []
        words += ["uneven layers"] if len({*(parallelism.layers or ())}) > 1 else []
        return ", ".join(words)


class Difference(NamedTuple):
    """How much longer another candidate takes than the best one.

    Attributes
    ----------
    longer, spread
        The logarithm of its predicted iteration, without a schedule of its bound, over that of the best one; the
        standard deviation of that.
    variance
        What of its variance comes from each parameter, and from what is unexplained of both: shares that add up to 1.
    """

    longer: float
    spread: float
    variance: dict[str, float]

    @property
    def is_open(self) -> bool:
        """Whether the two cannot be distinguished: it is less than one standard deviation."""
        return self.longer < self.spread

    @property
    def largest(self) -> str:
        """The parameter, or `UNEXPLAINED`, that most of the variance comes from."""
        return max(self.variance, key=lambda name: self.variance[name])


def difference(best: Candidate, other: Candidate) -> Difference:
    """Compare a candidate with the best one; derivatives are by differences.

    Both are predicted with the same parameters, so that what is uncertain of these counts only as far as the candidates
    depend on them differently.
    """

    def sensitivity(candidate: Candidate) -> Floats:
        """How the iteration depends on the parameters: waiting grows like the work of the busiest device."""
        estimate = candidate.estimate
        stretched = (candidate.least_ms - estimate.after_ms) / max(estimate.busy_ms)

        def predict(gpu: Gpu) -> float:
            other = estimate.on(gpu)
            return stretched * max(other.busy_ms) + other.after_ms

        return gradient(predict, best.estimate.gpu)

    variances = ratio_variances(best.estimate.gpu, sensitivity(other) - sensitivity(best))
    total = sum(variances.values())
    return Difference(
        longer=log(other.least_ms / best.least_ms),
        spread=sqrt(total),
        variance={name: each / total for name, each in variances.items()} if total else {UNEXPLAINED: 1.0},
    )
