"""`HostUpdates`: optimizers on the host (Chronos-Offload) in a step, ops G, U and P, and between two steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from optpipe.errors import InputError, ScheduleError
from optpipe.model.ops import OPTIMIZER, Kind, Op
from optpipe.model.program import of_kinds
from optpipe.schedule import Schedule
from optpipe_runtime.execute.rank import Done, Feature, Handler, Rank
from optpipe_runtime.execute.report import StepRecord
from optpipe_runtime.features.host_optimizer import Factory, HostOptimizer
from optpipe_runtime.lowering.plan import Plan
from optpipe_runtime.measure.together import together
from optpipe_runtime.memory.engines import Clock, CopyEngine, Handle, ThreadEngine
from optpipe_runtime.ranks.layout import Layout
from optpipe_runtime.stage.io import Tensors
from optpipe_runtime.stage.trial import OpTimer, Spread, Trials


class HostUpdates(Feature):
    """Of this rank's stages. Making one is collective. Raises `InputError` if a stage cannot be updated here."""

    def __init__(self, rank: Rank, factories: Mapping[int, Factory], clipped: bool) -> None:
        self._rank, self._clipped = rank, clipped
        rank.cpu_group.require_equal(clip_host_updates=clipped)
        self.optimizers: Mapping[int, HostOptimizer] = rank.cpu_group.on_each_rank(
            lambda: _on_host(rank, factories, clipped)
        )
        self._everywhere = {s for stages in rank.cpu_group.gather([*self.optimizers]) for s in stages}
        self.handlers = dict.fromkeys((Kind.G, Kind.U, Kind.P), Handler(self._run))
        rank.freshen |= {s: optimizer.freshen for s, optimizer in self.optimizers.items()}

    @property
    def any(self) -> bool:
        """Whether a stage of any rank is updated on the host. Then no step can be undone."""
        return bool(self._everywhere)

    def require(self, schedule: Schedule, layout: Layout) -> None:
        for d, program in enumerate(schedule.programs):
            for op in program.ops() if of_kinds(program.table, *OPTIMIZER).any() else ():
                if op.kind in OPTIMIZER and op.stage not in self._everywhere:
                    raise ScheduleError(
                        f"{op} in the program of device {d}: stage {op.stage} has no optimizer on the host here, "
                        "Pipeline's host_optimizers does not name it"
                    )

    def profile(self, trials: Trials, clock: Clock, repeats: int) -> Mapping[int, Mapping[str, Spread]]:
        """All ranks at once. Second optimizers run with gradients of zero, so that the first keep their state."""
        updates = {s: (OpTimer(clock), optimizer.duplicate()) for s, optimizer in self.optimizers.items()}

        def once() -> None:
            for times, second in updates.values():
                for name, copies in second.try_ops().items():
                    times.copies(name, [copies])

        together(self._rank, once, [times for times, _ in updates.values()], clock, repeats)
        return {s: times.spreads() for s, (times, _) in updates.items()}

    # Inside a step

    def start(self, plan: Plan, evaluating: bool) -> None:
        """Brings in the parameters that the schedule does not bring in."""
        updated = set() if evaluating else _updated(plan)
        for s, optimizer in self.optimizers.items():
            if not evaluating:
                optimizer.start_step()
            if s not in updated:
                optimizer.synchronize()

    def end(self, plan: Plan, evaluating: bool) -> None:
        """Updates the stages that the schedule does not update, and waits until all updates are done. It does not wait
        until messages have left: gloo sends one only when its receiver asks for it, which may be far behind."""
        if evaluating or not self.optimizers:
            return
        self._rank.reductions.finish()
        updated = _updated(plan)
        for s, optimizer in self.optimizers.items():
            if s not in updated:
                optimizer.gradients_out()
                optimizer.update()
        for optimizer in self.optimizers.values():
            optimizer.wait_update()

    def _run(self, step: StepRecord, op: Op, received: Tensors) -> Done:
        """Runs G, U or P. While the stage's gradients are being reduced, its G and U are put off, and G passes the link
        on."""
        optimizer = self.optimizers[op.stage]
        run = {Kind.G: optimizer.gradients_out, Kind.U: optimizer.update, Kind.P: optimizer.parameters_in}[op.kind]
        copies: list[Handle] = []  # some come later
        with self._rank.link.in_order(op):
            if op.kind == Kind.P:
                copies += run()
            else:
                self._rank.reductions.when_ended(op.stage, lambda: copies.extend(run()))
        return Done(copies=copies)

    # Between two steps

    def synchronize(self) -> None:
        """As `Pipeline.synchronize`. Not collective."""
        for optimizer in self.optimizers.values():
            optimizer.synchronize()

    def require_tie(self, tied: Sequence[nn.Parameter]) -> None:
        """Collective: raises `InputError` if these parameters cannot be tied."""
        tied_stages = [s for s, host in self.optimizers.items() if not host.parameters.isdisjoint(tied)]
        for stages in self._rank.cpu_group.gather(tied_stages):
            if stages:
                raise InputError(
                    f"tie: stage {stages[0]} has a copy, and updates it on the host before gradients are summed over "
                    "the copies: leave the stage out of host_optimizers"
                )

    def gradient_holders(self) -> Mapping[nn.Parameter, nn.Parameter]:
        """For parameters whose gradients are on the host, the copies there. Raises `InputError` on all ranks alike if
        they are nowhere any more, and cannot be clipped."""
        if self._everywhere and not self._clipped:
            raise InputError(
                "clip_grad_norm_: stages with host_optimizers are updated inside the step, before the norm of all "
                "gradients is known: make the Pipeline with clip_host_updates=True"
            )
        return {p: copy for optimizer in self.optimizers.values() for p, copy in optimizer.gradients().items()}

    def close(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.close()


@lru_cache(maxsize=1)
def _updated(plan: Plan) -> set[int]:
    return {action.op.stage for action in plan.actions if action.op.kind == Kind.U}


def _on_host(rank: Rank, factories: Mapping[int, Factory], clipped: bool) -> dict[int, HostOptimizer]:
    """The optimizers of this rank's stages, without their wrappers."""
    stages = rank.replicas.modules
    for s in factories:
        if not 0 <= s < len(rank.layout.placement):
            raise InputError(f"host_optimizers[{s}]: there are {len(rank.layout.placement)} stages, numbered from 0")
    hosted = sorted(factories.keys() & stages.keys())
    for s in hosted:  # gradients leave at G, inside the step: nothing may add to them later
        names = {parameter: name for name, parameter in stages[s].named_parameters()}
        for other, module in stages.items():
            for parameter in names.keys() & set(module.parameters()) if other != s else ():
                raise InputError(
                    f"host_optimizers[{s}]: {names[parameter]} is in stage {other}, too, which adds to its gradient"
                )
    if not hosted:
        return {}
    updates = _update_engine(rank.device)
    return {
        s: HostOptimizer(s, stages[s].named_parameters(), factories[s], rank.link, updates, clipped) for s in hosted
    }


def _update_engine(device: torch.device) -> CopyEngine:
    """A thread for a rank's updates. Its marks are the device's, so that a trace can compare them with other ops."""
    if device.type != "cuda":
        return ThreadEngine()
    clock, idle = Clock(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark() -> Any:
        torch.cuda.set_device(device)  # else this thread would start CUDA on the first device, too
        with torch.cuda.stream(idle):  # an event on an idle stream is done at once
            return clock.mark()

    return ThreadEngine(mark)
