"""What does not wait for W: which parameters get their gradient at B, and how much of B's time that takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from optpipe_runtime.clock import Clock
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.measure.trial import OpTimer, Trial
from optpipe_runtime.stage.runner import StageRunner
from optpipe_runtime.torch_private.modules import is_compiled

WARM_UP = 2  # rounds
MOST_NAMES = 4  # in a log line


@dataclass(frozen=True)
class AtB:
    """Of one stage.

    Attributes
    ----------
    names
        The parameters whose gradient comes at B.
    trained
        How many parameters have gradients.
    share
        The part of B's time that is gone if they are frozen; of a compiled stage while nothing is compiled, because it
        would be compiled again. None where that is not measured: in DDP or FSDP, or if some of these gradients wait for
        W while nothing is compiled.
    """

    names: tuple[str, ...]
    trained: int
    share: float | None

    def __str__(self) -> str:
        more = f" and {len(self.names) - MOST_NAMES} more" if len(self.names) > MOST_NAMES else ""
        time = (
            "a part of its time that was not measured"
            if self.share is None
            else f"{100 * self.share:.0f} % of its time"
        )
        return (
            f"gradients of {len(self.names)} of {self.trained} parameters come at B, not at W, in {time}: "
            f"{', '.join(self.names[:MOST_NAMES])}{more}"
        )


def at_b(rank: Rank, trials: Sequence[Trial], clock: Clock, repeats: int) -> dict[int, AtB]:
    """Collective: by stage, those of all ranks that have any. Each stage's B must have run."""
    own: dict[int, AtB] = {}
    for trial in trials:
        stage = trial.stage
        if stage.at_b and stage.index not in own:
            wrapped = bool(rank.replicas.ranks(stage.index))
            share = None if wrapped else _share(trial, stage.at_b, clock, repeats)
            trained = sum(parameter.requires_grad for parameter in stage.module.parameters())
            own[stage.index] = AtB(tuple(sorted(stage.at_b)), trained, share)
    return {s: found for stages in rank.cpu_group.gather(own) for s, found in stages.items()}


def _share(trial: Trial, names: frozenset[str], clock: Clock, repeats: int) -> float | None:
    if not any(map(is_compiled, trial.stage.module.modules())):
        return _gone(trial, names, clock, repeats)
    with torch.compiler.set_stance("force_eager"), _norms_at_b(trial.stage):
        trial.backward(OpTimer(clock), "all")
        return _gone(trial, names, clock, repeats) if names <= (trial.stage.at_b or frozenset()) else None


@contextmanager
def _norms_at_b(stage: StageRunner) -> Iterator[None]:
    """In this context the gradients of norms come at B, as in a compiled region, and `at_b` is found anew."""
    before = stage.norms_wait, stage.at_b
    stage.norms_wait, stage.at_b = False, None
    try:
        yield
    finally:
        stage.norms_wait, stage.at_b = before


def _gone(trial: Trial, names: frozenset[str], clock: Clock, repeats: int) -> float:
    """The part of B's time that is gone if the parameters of these names are frozen."""
    parameters = [p for name, p in trial.stage.module.named_parameters() if name in names and p.requires_grad]
    times = OpTimer(clock)
    for r in range(WARM_UP + repeats):
        if r == WARM_UP:
            clock.settle()
            times.clear()
        for name, trained in (("all", True), ("others", False)):
            for parameter in parameters:
                parameter.requires_grad_(trained)
            try:
                trial.backward(times, name)
            finally:
                for parameter in parameters:
                    parameter.requires_grad_(True)
    clock.settle()
    spreads = times.spreads()
    return max(0.0, 1 - spreads["others"].ms / spreads["all"].ms) if spreads["all"].ms else 0.0
