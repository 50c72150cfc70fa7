"""`Pipeline`: a model in stages over the ranks of torch.distributed, trained by an OptPipe schedule that can change
between two steps.

    dist.init_process_group("gloo")                                       # "nccl" on GPUs; started by torchrun
    rank = dist.get_rank()
    placement = [0, 1]                                                    # the rank of each stage
    stages = {s: make_stage(s) for s, owner in enumerate(placement) if owner == rank}
    with Pipeline(stages, placement, F.cross_entropy, microbatches=8) as pipe:
        problem = pipe.profile(inputs, targets, activation_budget_bytes=2 * 10**9)   # the same optpipe.Problem on every
        rank pipe.load(schedule)                                               # an optpipe.Schedule for that problem;
        rank 0's counts for inputs, targets in batches:
            optimizer.zero_grad()
            report = pipe.step(inputs, targets)                           # losses, gradients in .grad, times, peak
            bytes optimizer.step()

While it trains, `pipe.offer(better)` on rank 0, from any thread, returns at once: every rank prepares the schedule
beside the training, and all swap to it at the first step boundary at which all are ready; where one refuses it, all
keep what they have and the log says why.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from optpipe.errors import InputError, OptPipeError, ScheduleError
from optpipe.evaluate.jit import compile_at_once
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime.execute.executor import Executor, StepReport, cut
from optpipe_runtime.execute.learning import Learner
from optpipe_runtime.execute.lowering import Plan, prepare
from optpipe_runtime.execute.optimizer import Factory, HostOptimizer, on_host
from optpipe_runtime.execute.stage import LossFn, StageRunner
from optpipe_runtime.given import device_of, one_kind, require_alike, require_bytes, require_sound
from optpipe_runtime.measure.profiler import Measured, budget, profile
from optpipe_runtime.memory.peers import Peers
from optpipe_runtime.memory.pool import HostPool, Link
from optpipe_runtime.memory.turns import require_queues, tokens
from optpipe_runtime.ranks.agreement import Council, Offers
from optpipe_runtime.ranks.clipping import clip
from optpipe_runtime.ranks.layout import Layout
from optpipe_runtime.ranks.mail import Mail
from optpipe_runtime.ranks.rank import Rank
from optpipe_runtime.ranks.replicas import Replicas
from optpipe_runtime.ranks.team import LostError, Team
from optpipe_runtime.ranks.ties import Tie
from optpipe_runtime.swaps import Swaps, ran_out, snapshot

log = logging.getLogger("optpipe.runtime")

CLOSE_S = 5.0  # threads of a pipeline that has failed may wait for others; then they are left to end when those do

P = ParamSpec("P")
R = TypeVar("R")


def _together(method: Callable[Concatenate[Pipeline, P], R]) -> Callable[Concatenate[Pipeline, P], R]:
    """Of methods that all ranks call: when one fails, all do, and where another rank has called another, all are
    told."""

    @wraps(method)
    def guarded(self: Pipeline, /, *arguments: P.args, **options: P.kwargs) -> R:
        if self._closed:
            raise InputError(f"{method.__name__} was called after close: this pipeline has ended, make a new one")
        with self._rank.team.together():
            self._rank.council.enter(method.__name__)
            if method.__name__ != "step":  # which begins with a vote anyway
                self._rank.council.least()
            return method(self, *arguments, **options)

    return guarded


class Pipeline:
    """This rank's part of the pipeline. Making one is collective: every rank does it, with the same placement. With
    data parallelism each replica of the pipeline is a process `group`, all alike, and `placement` numbers the ranks as
    the group does.

    `stages` maps the stages placed on this rank to their modules: tensors in, a tensor or a tuple of tensors out, of
    the same shapes for every micro-batch. `loss_fn(output, *targets)` gives the mean loss of a micro-batch, on the last
    stage's rank. Gradients are those of the mean over the whole batch. `routes` and `microbatch_routes` say which
    stages each micro-batch passes, as in a problem; without them it is all, in order; copies of a stage that serve
    several routes are tied (`tie`). `peers` says for each rank to which other it may evict activations, or None.
    `host_memory_bytes` limits what this rank keeps on the host (None: no limit); `full_duplex`: offloads and reloads
    run at the same time; `links` names for each rank the host link that it shares with others, or None: on it they take
    turns. The modules stay the user's: parameters, buffers, state dict and optimizer are untouched. They may be in
    `DistributedDataParallel` or `fully_shard`ed over the replicas: gradients are then the mean over them, too.
    `host_optimizers` gives stages, here or on other ranks, an optimizer that runs on the host, inside the step
    (docs/training.md). Raises `InputError` for what does not fit together.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        placement: Sequence[int],
        loss_fn: LossFn,
        microbatches: int,
        host_memory_bytes: int | None = None,
        full_duplex: bool = False,
        routes: Sequence[Sequence[int]] | None = None,
        microbatch_routes: Sequence[int] | None = None,
        peers: Sequence[int | None] | None = None,
        links: Sequence[str | None] | None = None,
        host_optimizers: Mapping[int, Factory] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise InputError(
                "Pipeline needs torch.distributed.init_process_group first; start the script with torchrun"
            )
        team = Team(group)
        council = Council(team)

        def sound() -> tuple[Layout, torch.device | None, Replicas]:
            require_sound(stages, placement, microbatches, {"peers": peers, "links": links}, team.number, team.size)
            require_bytes("host_memory_bytes", host_memory_bytes)
            layout = Layout.make(placement, microbatches, routes, microbatch_routes, peers, links, full_duplex)
            if not callable(loss_fn) and not layout.last.isdisjoint(stages):
                raise InputError(
                    f"loss_fn = {loss_fn!r}: must be a function of the last stage's output and the targets"
                )
            return layout, device_of(stages), Replicas(stages, team)

        layout, own_device, self._replicas = council.each(sound)
        device = one_kind(own_device, council.gather(own_device and own_device.type))
        council.each(lambda: require_queues(layout, device))
        require_alike(council, microbatches=microbatches, **asdict(layout))
        link, pool = Link(device, full_duplex, tokens(team, layout, device)), HostPool(device, host_memory_bytes)
        self._rank = Rank(
            team=team,
            layout=layout,
            device=device,
            stages={
                s: StageRunner(s, module, device, link, pool, (loss_fn, 1 / microbatches) if s in layout.last else None)
                for s, module in self._replicas.modules.items()
            },
            council=council,
            mail=Mail(team, layout, device),
            pool=pool,
            link=link,
            peers=Peers(team, layout, device),
            host_optimizers=council.each(lambda: on_host(host_optimizers or {}, stages, layout, team, link, device)),
        )
        self.problem: Problem | None = None  # set by `profile`: from then on every schedule must fit it
        self.measured: Measured | None = None  # set by `profile`: how far what it measured is spread
        self._swaps = Swaps(council)
        self._undoable = bool(council.least(not self._rank.host_optimizers)[0])  # whether no step updates parameters
        self._last_ms: float | None = None  # of the last step here
        self._given: tuple[Any, Any] = None, None  # the batch of this step
        self._closed = False
        self._ties: list[Tie] = []
        self._learner = Learner(self._rank)
        self._executor = Executor(self._rank)
        self._offers = Offers(council, Council(team), self._welcome, self._accept)

    # Training

    @_together
    def step(self, inputs: Any = None, targets: Any = None, trace: bool = False) -> StepReport:
        """Collective: one training step, forward and backward; the optimizer is the caller's.

        `inputs` (where a route begins) and `targets` (where one ends) are the whole batch on this rank's device, a
        tensor or a tuple of tensors, cut into micro-batches along the first dimension; other ranks may leave them out.
        Where shapes, the modules' modes or what is trained have changed since the step before, the stages are learned
        anew.
        """
        self._given = inputs, targets
        known = self._learner.knows(inputs, targets)
        with self._replicas.whole():
            offered, (all_know, last) = self._offers.boundary(known, -round(1e3 * (self._last_ms or 0)))
            back = self._swaps.begin_step(-last / 1e3 if self._last_ms is not None else None, bool(all_know))
            if not all_know and self._learner.done:
                self._learn(inputs, targets)
            if offered is not None:
                self._swap(offered, offered=True)
            elif back is not None:
                self._swap(*back)
            report = self._attempt(inputs, targets, trace)
            self._replicas.reduce()
        for tie in self._ties:
            tie.end_step()
        self._last_ms = report.step_ms
        return replace(report, version=self.version)

    def _attempt(self, inputs: Any, targets: Any, trace: bool) -> StepReport:
        """A step by the loaded schedule; where its first one runs out of memory, undone and repeated by the one
        before."""
        while True:
            plan = self._loaded()
            if not self._learner.done:  # never yet, or not for so many micro-batches
                self._learner.learn(inputs, targets)
                if not self._rank.council.least(not (lacking := self._lacking(plan)))[0]:
                    self._swap(*self._swaps.give_up(lacking))
                    continue
            undo = snapshot(self._rank, self._given) if self._swaps.on_trial and self._undoable else None
            for tie in self._ties:
                tie.start_step()
            complaint = ""
            with self._rank.team.alone():
                try:
                    report = self._executor.run(plan, inputs, targets, trace)
                except Exception as error:
                    if undo is None or not ran_out(error):
                        raise
                    complaint = self._rank.team.blame(error)
                    self._executor.abandon()
            if undo is None or self._rank.council.least(not complaint)[0]:
                self._swaps.end_step()
                return report
            undo()
            self._replicas.forget()
            self._swap(*self._swaps.give_up(complaint))

    @_together
    def evaluate(self, inputs: Any = None, targets: Any = None, trace: bool = False) -> StepReport:
        """Collective: losses of a batch, by the loaded schedule's forwards alone. Arguments as for `step`; modes are
        the caller's."""
        with self._replicas.whole():
            if not self._rank.council.least(self._learner.knows_batch(inputs, targets))[0]:
                self._learn(inputs, targets)
            plan = self._loaded()
            with self._rank.team.alone():
                report = self._executor.run(plan, inputs, targets, trace, evaluating=True)
        return replace(report, version=self.version)

    @_together
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Collective: after `step`, scales the gradients of all stages so that their norm, tied copies counted once, is
        at most `max_norm`.

        Returns the norm before. As `torch.nn.utils.clip_grad_norm_` of the whole model; on each rank's own stages that
        would be another.
        """
        if not self._rank.council.least(not self._rank.host_optimizers)[0]:
            raise InputError(
                "clip_grad_norm_: stages with host_optimizers are updated inside the step, before the norm of "
                "all gradients is known: clip "
                "there, in a register_step_pre_hook of the optimizer, the stage's own"
            )
        parameters = (parameter for stage in self._rank.stages.values() for parameter in stage.module.parameters())
        return clip(
            parameters, (p for tie in self._ties for p in tie.uncounted), self._rank.council, max_norm, norm_type
        )

    def synchronize(self) -> None:
        """Brings in the parameters that stages with `host_optimizers` have after their last update; the next step does
        so by its schedule. Call it before parameters are read, saved or changed; `evaluate` does."""
        for host in self._rank.host_optimizers.values():
            host.synchronize()

    @property
    def host_optimizers(self) -> Mapping[int, HostOptimizer]:
        """Of this rank's stages that have one: `optimizer`, for a scheduler of learning rates, and `state_dict`,
        `load_state_dict`."""
        return self._rank.host_optimizers

    @_together
    def tie(self, copy: nn.Parameter | nn.Module | None) -> None:
        """Collective: ties copies of one parameter (tied embeddings) or of one module (a stage that serves two routes)
        that several ranks hold; a rank without one passes None.

        The copies' parameters take the values of the lowest rank's, and after every step the sum of their gradients;
        buffers stay each copy's own. Two stages on one rank need no tie: they share the parameter itself. For the two
        directions of DualPipe on p ranks: `for k in range(p): pipe.tie(stages.get(k, stages.get(p + k)))`.
        """
        tied = copy.parameters() if isinstance(copy, nn.Module) else [] if copy is None else [copy]
        updated = [s for s, host in self._rank.host_optimizers.items() if not host.parameters.isdisjoint(tied)]
        for stages in self._rank.council.gather(updated):
            if stages:
                raise InputError(
                    f"tie: stage {stages[0]} has a copy, and updates it on the host before gradients are summed "
                    "over the copies: leave "
                    "the stage out of host_optimizers"
                )
        self._ties.append(Tie(copy, self._rank.council, self._rank.team))

    @property
    def schedule(self) -> Schedule | None:
        """The schedule that runs now."""
        return None if self.plan is None else self.plan.schedule

    @property
    def plan(self) -> Plan | None:
        return self._swaps.plan

    @property
    def at_b(self) -> dict[int, frozenset[str]]:
        """By stage of this rank that has run a B: the parameters, by name, whose gradient B computes and does not leave
        to W."""
        return {s: stage.at_b for s, stage in self._rank.stages.items() if stage.at_b is not None}

    @property
    def version(self) -> int:
        """How many schedules have been swapped in."""
        return self._swaps.version

    @property
    def preparing(self) -> bool:
        """Whether an offer is being prepared: between two steps the same on every rank."""
        return self._offers.preparing

    @property
    def layout(self) -> Layout:
        return self._rank.layout

    @property
    def number(self) -> int:
        """This rank's, among those of this pipeline."""
        return self._rank.number

    @_together
    def gather(self, value: Any) -> list[Any]:
        """Collective: every rank's value, by rank."""
        return self._rank.council.gather(value)

    def _loaded(self) -> Plan:
        if self._swaps.plan is None:
            raise InputError("no schedule is loaded: call load(schedule) before the first step")
        return self._swaps.plan

    # Schedules

    @_together
    def load(self, schedule: Schedule | None) -> None:
        """Collective: rank 0's schedule, prepared and swapped in on every rank, or on none: then `ScheduleError` says
        what is wrong."""
        compile_at_once()  # here, where no step waits for it
        plan, complaint = None, None
        try:
            plan = self.prepare(self._rank.council.share(schedule))
            if plan.problem.microbatches == self._rank.layout.microbatches:
                self._reserve(plan)
        except LostError:
            raise
        except OptPipeError as error:
            plan, complaint = None, str(error)
        if not self._rank.council.agree(plan):
            reasons = [
                f"rank {rank}: {reason}" for rank, reason in enumerate(self._rank.council.gather(complaint)) if reason
            ]
            raise ScheduleError(
                reasons[0] if reasons else "the ranks prepared different schedules: they were profiled differently"
            )
        assert plan is not None
        self._swap(plan)

    def offer(self, schedule: Schedule) -> None:
        """Rank 0, any thread: proposes a schedule for one of the next steps, without waiting."""
        if self._rank.number != 0:
            raise InputError(f"offer was called on rank {self._rank.number}: schedules are offered on rank 0")
        self._offers.offer(schedule)

    def prepare(self, schedule: Schedule) -> Plan:
        """Checks a schedule for this pipeline and lowers it for this rank. No side effects, any thread; raises
        `ScheduleError`.

        It may be for another number of micro-batches. Then the costs of its own problem count, for those measured here
        were of larger or smaller micro-batches, and once it is swapped in they are `problem`.
        """
        layout, problem, theirs = self._rank.layout, self.problem, Layout.of(schedule.problem)
        if theirs.microbatches != layout.microbatches and theirs.routes == layout.routes:
            layout, problem = replace(layout, microbatch_routes=theirs.microbatch_routes), None
        return prepare(schedule, self._rank.number, layout, problem, self._rank.host_optimizers.keys())

    def _swap(self, plan: Plan, why: str = "", offered: bool = False) -> None:
        """Between two steps: runs `plan` from now on. Every rank swaps to the same one."""
        if not self._executor.idle:
            raise OptPipeError("a schedule can be swapped only between two steps")
        if plan.problem.microbatches == self._rank.layout.microbatches:
            self._reserve(plan)
        else:
            self._relay(plan)
        self._swaps.take(plan, offered, why)

    def _relay(self, plan: Plan) -> None:
        """The pipeline for another number of micro-batches; the next step learns its stages anew."""
        layout = replace(self._rank.layout, microbatch_routes=Layout.of(plan.problem).microbatch_routes)
        self._rank = replace(self._rank, layout=layout)
        for stage in self._rank.stages.values():
            stage.weigh(1 / layout.microbatches)
        self._executor, self._learner = Executor(self._rank), Learner(self._rank)
        if self.problem is not None:
            self.problem = plan.problem

    def _welcome(self, schedule: Schedule) -> Plan:
        """An offer, prepared."""
        plan = self.prepare(schedule)
        self._swaps.require_welcome(plan)
        _ = plan.schedule.makespan_ms  # kept, for the log of the swap
        return plan

    def _accept(self, plan: Plan) -> None:
        """Whether this rank can run it from now on: raises `OptPipeError`, here where memory or this step's batch is
        against it."""
        if plan.problem.microbatches == self._rank.layout.microbatches:
            self._reserve(plan)
            return
        for takes, value, what in zip(
            (self._rank.takes_inputs, self._rank.takes_targets), self._given, ("inputs", "targets"), strict=True
        ):
            if takes:
                cut(value, plan.problem.microbatches, what)

    def _reserve(self, plan: Plan) -> None:
        """Takes the host memory that a plan needs, if it is not there yet; `OptPipeError` where there is too little."""
        pool, parts = self._rank.pool, [stage.offload_parts for stage in plan.problem.stages]
        sizes = {
            s: [pool.size(nbytes) for nbytes in stage.part_bytes(parts[s])] for s, stage in self._rank.stages.items()
        }
        pool.reserve(plan.host_peak(lambda s, part: sizes[s][part]))

    def _lacking(self, plan: Plan) -> str:
        """What stands against `plan` now that its micro-batches are known."""
        try:
            self._reserve(plan)
        except OptPipeError as error:
            return self._rank.team.blame(error)
        return ""

    # Profile

    @_together
    def profile(
        self,
        inputs: Any = None,
        targets: Any = None,
        activation_budget_bytes: int | None = None,
        offload_parts: int = 1,
        repeats: int = 7,
    ) -> Problem:
        """Collective: measures every stage and link, and returns the same problem on every rank; from now on schedules
        must fit it.

        `inputs` and `targets` as for `step`. `activation_budget_bytes` is this rank's activation budget: what it may
        hold of saved tensors, beside weights, gradients, optimizer state and workspace; on CUDA by default what is free
        now, so take one optimizer step before. With `offload_parts` an activation leaves in that many parts.
        Parameters, gradients, buffers and random numbers stay as they are.
        """
        if not self._executor.idle:
            raise OptPipeError("a pipeline is profiled only between two steps")
        rank = self._rank
        require_alike(rank.council, offload_parts=offload_parts, repeats=repeats)

        def allowed() -> int:
            if repeats < 1 or offload_parts < 1:
                raise InputError(f"repeats = {repeats}, offload_parts = {offload_parts}: both must be at least 1")
            require_bytes("activation_budget_bytes", activation_budget_bytes)
            return budget(rank) if activation_budget_bytes is None else activation_budget_bytes

        with self._replicas.whole():
            if not rank.council.least(self._learner.knows(inputs, targets))[0]:
                self._learn(inputs, targets)
            given = cut(inputs, rank.layout.microbatches, "inputs")[0] if rank.takes_inputs else ()
            asked = cut(targets, rank.layout.microbatches, "targets")[0] if rank.takes_targets else ()
            available = rank.council.each(allowed)
            with rank.team.alone():
                self.measured = profile(rank, given, asked, available, offload_parts, repeats)
        if rank.number == 0 and self.measured.launch_bound:
            log.warning(
                "these may be as long as the host takes to launch them, stage and time: %s", self.measured.launch_bound
            )
        self.problem = self.measured.problem
        return self.problem

    # Inside

    def _learn(self, inputs: Any, targets: Any) -> None:
        """Collective."""
        if self._learner.done and self.problem is not None:
            log.warning(
                "the batch or the stages are not those that were profiled: what the schedule needs of time and "
                "memory is not known"
            )
        self._learner.learn(inputs, targets)
        if self.plan is not None:
            with self._rank.team.alone():
                self._reserve(self.plan)

    def close(self) -> None:
        """Ends the threads of this pipeline, which is of no use any more."""
        self._closed = True
        if self._rank.team.failure is None:
            self._end_threads()
        else:
            thread = threading.Thread(target=self._end_threads, name="optpipe-close", daemon=True)
            thread.start()
            thread.join(CLOSE_S)

    def _end_threads(self) -> None:
        self._offers.close()
        self._rank.mail.close()
        self._rank.link.close()
        self._rank.peers.close()
        for host in self._rank.host_optimizers.values():
            host.close()
        self._rank.team.end()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:  # whatever it is, this rank does not come back: the others must not wait
            self._rank.team.fail(self._rank.team.blame(error))
        self.close()
