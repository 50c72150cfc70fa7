"""What does not wait for W: which parameters get their gradient at B, and how much of B's time that takes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from optpipe_runtime.clock import Clock
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.measure.trial import OpTimer, Trial

log = logging.getLogger("optpipe.runtime")

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
        The part of B's time that is gone if they are frozen. None where that is not measured: a compiled stage would be
        compiled again.
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
            share = None if wrapped or _compiled(stage.module) else _share(trial, stage.at_b, clock, repeats)
            trained = sum(parameter.requires_grad for parameter in stage.module.parameters())
            own[stage.index] = AtB(tuple(sorted(stage.at_b)), trained, share)
    return {s: found for stages in rank.cpu_group.gather(own) for s, found in stages.items()}


def tell(found: Mapping[int, AtB]) -> None:
    for s, stage in sorted(found.items()):
        log.info("stage %d: %s", s, stage)


def _share(trial: Trial, names: frozenset[str], clock: Clock, repeats: int) -> float:
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


def _compiled(module: nn.Module) -> bool:
    return any(
        part._compiled_call_impl is not None or hasattr(part, "get_compiler_config") or hasattr(part, "_orig_mod")
        for part in module.modules()
    )
