"""When the gradients of stages that are sharded over replicas are reduced several times a step (ZeRO-2), so that a rank
holds few whole gradients (Lin et al. 2025, ChronosPipe, section 4.3).

The first backward of one stage more than may be whole needs the room of the stage whose last backward or W lies longest
ago: that one is reduced behind this op, at once, and waited for where its room is needed. Replicas do this if they run
the same schedule for the same problem: their reductions then have one order, that of the program, and every wait is for
an op that comes earlier in the common order of all ops (`lowering.actions`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from optpipe.errors import InputError
from optpipe.model.ops import Op
from optpipe_runtime.execute.handler import Feature
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.execute.report import StepRecord
from optpipe_runtime.lowering.plan import WEIGHT, Plan


class Windows(NamedTuple):
    """Of one rank. `ends`: the ops behind which the gradients of their stage leave, and before the stage's last one.
    `room`: for each op that needs the room of another stage's gradients, that stage."""

    ends: frozenset[Op]
    room: Mapping[Op, int]


NO_WINDOWS = Windows(frozenset(), {})


def windows(ops: Iterable[Op], whole: int) -> Windows:
    """The windows of a rank's ops, in program order, if it may hold `whole` stages' whole gradients."""
    held: dict[int, Op] = {}  # by stage its last op that adds to them; the stage that was used last comes last
    left: dict[int, Op] = {}  # the ops behind which stages left
    ends: set[Op] = set()
    room: dict[Op, int] = {}
    for op in ops:
        if op.kind not in WEIGHT:
            continue
        s = op.stage
        if s in left:
            ends.add(left.pop(s))
        if s not in held and len(held) == whole:
            oldest = next(iter(held))
            left[oldest] = held.pop(oldest)
            room[op] = oldest
        held.pop(s, None)
        held[s] = op
    return Windows(frozenset(ends), room)


class GradientWindows(Feature):
    """Runs steps in windows where the replicas agree on it. Making one is collective: raises `InputError` if the stages
    cannot be reduced so."""

    def __init__(self, rank: Rank, whole_gradients: int | None) -> None:
        self._rank, self._reductions, self._whole = rank, rank.reductions, whole_gradients
        rank.cpu_group.on_each_rank(self._require)
        self._in_windows = False  # this step

    def _require(self) -> None:
        whole = self._whole
        if whole is None:
            return
        if not isinstance(whole, int) or whole < 1:
            raise InputError(f"whole_gradients = {whole!r}: must be an integer, at least 1, or None for all stages")
        wanted, replicas = f"whole_gradients = {whole}", self._rank.replicas
        for s, module in replicas.modules.items():
            if any(p.requires_grad for p in module.parameters()) and not replicas.is_sharded(s):
                raise InputError(
                    f"{wanted}: stage {s} is not sharded over replicas, so its gradients stay whole: use fully_shard"
                )
            if len(replicas.sharing[s]) > 1:
                raise InputError(
                    f"{wanted}: stages {sorted(replicas.sharing[s])} share a parameter, whose gradient is whole until "
                    "both are complete: leave out whole_gradients"
                )
        spans = sorted({tuple(sorted(ranks)) for s in replicas.modules if (ranks := replicas.ranks(s))})
        if len(spans) > 1:
            raise InputError(f"{wanted}: a rank's stages must be sharded over the same ranks, these are over {spans}")

    def require_own_schedules(self) -> None:
        if self._whole is not None:
            raise InputError(
                f"whole_gradients = {self._whole}: all replicas must run one schedule then, so a step cannot have its "
                "own: leave it out"
            )

    def agree_on_step(self, plan: Plan | None, on_trial: bool) -> None:
        """This step is in windows if all replicas run the same schedule for the same problem."""
        if self._whole is None:
            return
        agreed = self._rank.replicas.agree(0 if plan is None else plan.number ^ self._whole)
        # On all ranks of the pipeline, where that decides whether the step can be undone.
        self._in_windows = bool(self._rank.cpu_group.minimum(agreed)[0]) if on_trial else agreed
        self._reductions.start_step(in_program_order=self._in_windows)

    @property
    def is_fixed(self) -> bool:
        """Windows are those of one schedule, and what they have reduced is in the other replicas' gradients."""
        return self._in_windows

    def before_op(self, step: StepRecord, op: Op) -> None:
        """Waits for the room of a stage whose gradients have left."""
        if not step.evaluating and op in (room := self.reduced_before(step.plan)):
            self._reductions.let_go(room[op])

    def after_op(self, step: StepRecord, op: Op) -> None:
        """Starts to reduce what a window has added up. No stage begins its backwards before all ranks have begun the
        step, so this waits for no vote."""
        if not step.evaluating and op in self._windows_in(step.plan).ends:
            if step.will_count():
                self._rank.means.end_window(op.stage)
                self._reductions.start(op.stage, self._rank.replicas.window)
            else:
                self._rank.replicas.forget()

    def reduced_before(self, plan: Plan) -> Mapping[Op, int]:
        return self._windows_in(plan).room

    def _windows_in(self, plan: Plan) -> Windows:
        """Of a step by this plan."""
        if not self._in_windows or self._whole is None:
            return NO_WINDOWS
        return _windows_of(plan, self._whole)


@lru_cache(maxsize=1)
def _windows_of(plan: Plan, whole: int) -> Windows:
    return windows((action.op for action in plan.actions), whole)
