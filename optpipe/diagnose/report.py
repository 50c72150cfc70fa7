"""`diagnose`: from files to what is lost, why, and what to change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from optpipe.diagnose.batches import UserFacts
from optpipe.diagnose.cures import Cures, Progress, find_cures
from optpipe.diagnose.lines import STACK_OF_FORM, some
from optpipe.diagnose.losses import CAUSE, NAMES, Losses, explain
from optpipe.diagnose.runs import Runs, collect_runs
from optpipe.errors import InputError, did_you_mean
from optpipe.formats.stacks import STACKS
from optpipe.measured.recording import Recording
from optpipe.model.ops import Kind
from optpipe.options import SolveArguments, StackName

MOST_HELD = 1_000_000  # activations on a device


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What a trace shows: what ran, where its time went, and what to change."""

    form: str  # of the files, as `optpipe problem from` names it
    stack: StackName  # for which the lines of cures are
    runs: Runs
    losses: Losses
    cures: Cures

    @property
    def causes(self) -> list[str]:
        """What causes losses, the largest first, one sentence each; how much each costs stands in `losses`."""
        step_ms = float(np.mean(self.losses.measured_ms))
        unexplained = self.losses.parts[0].mean_ms / step_ms
        doubt = [f"{NAMES['unexplained']}: {unexplained:.1%} of a step, so the other figures are in doubt"]
        named = {"far-ops": self._far, "slow-device": self._slow, "stages": self._uneven}
        return doubt * (abs(unexplained) > CAUSE) + [
            f"{named[part.name]() if part.name in named else NAMES[part.name]}: {part.mean_ms / step_ms:.1%} of a step"
            for part in self.losses.causes
        ]

    @property
    def assumed(self) -> tuple[str, ...]:
        """What is taken to be so, as files lack it or cures are predicted without it, one sentence each."""
        if not self.losses.far_ops:
            return self.runs.assumed
        more = int((self.losses.usual.ms < self.runs.ms).sum()) - 1
        far = f"no op of a cure takes far longer than usual: {self._far_op}{f', and {more} more' * (more > 0)}"
        return (*self.runs.assumed, far)

    @property
    def _far_op(self) -> str:
        far = self.losses.far_ops[0]
        replica = f" of replica {far.replica}" if len(self.runs.replicas) > 1 else ""
        return f"{far.op} of step {far.step}{replica} took {far.ms:.4g} ms instead of the usual {far.usual_ms:.4g}"

    def _far(self) -> str:
        lost = f"which made this step {self.losses.far_ops[0].lost_ms:.4g} ms longer"
        return f"{self._far_op}, {lost}; all ops far longer than usual"

    def _slow(self) -> str:
        end = int(self.runs.steps[-1])
        sentences = [
            f"device {each.device} of replica {each.replica} takes {each.factor:.2f} times as long as others with the "
            f"same work{f' since step {each.first_step}' * each.since}"
            f"{f' until step {each.last_step}' * (each.last_step != end)}"
            for each in self.losses.slow_devices
        ]
        return some(sentences, "devices")

    def _uneven(self) -> str:
        uneven = [f"stage {s} takes {factor:.2f} times as long as the mean" for s, factor in self.losses.uneven_stages]
        alone = "; with one replica, a slow device looks the same" if len(self.runs.replicas) == 1 else ""
        return (some(uneven, "stages") or NAMES["stages"]) + alone

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        runs, losses = self.runs, self.losses
        return {
            "form": self.form,
            "stack": self.stack,
            "steps": runs.steps.tolist(),
            "replicas": len(runs.replicas),
            "devices": runs.devices,
            "stages": len(runs.where),
            "measured_ms": losses.measured_ms.tolist(),
            "replayed_ms": losses.replayed_ms.tolist(),
            "replay_error": losses.replay_error,
            "losses": [
                {
                    "name": part.name,
                    "what": NAMES[part.name],
                    "avoidable": part.avoidable,
                    "mean_ms": part.mean_ms,
                    "ms": part.ms.tolist(),
                }
                for part in losses.parts
            ],
            "causes": self.causes,
            "far_ops": [each._asdict() | {"op": str(each.op)} for each in losses.far_ops],
            "slow_devices": [each._asdict() for each in losses.slow_devices],
            "uneven_stages": [{"stage": s, "factor": factor} for s, factor in losses.uneven_stages],
            "cures": [
                {
                    "name": cure.name,
                    "what": cure.title,
                    "gain": cure.gain,
                    "gain_at_most": cure.most,
                    "ms": cure.ms.tolist(),
                    "before_ms": cure.before_ms.tolist(),
                    "bound_ms": cure.bound_ms.tolist(),
                    "activations": list(cure.activations),
                    "lines": list(cure.lines),
                    "file": cure.file and {"name": cure.file[0], "text": cure.file[1]},
                }
                for cure in self.cures.cures
            ],
            "cures_on_steps": list(self.cures.steps),
            "held_activations": list(self.cures.held),
            "asked": list(self.cures.asked),
            "assumed": list(self.assumed),
            "unused": list(runs.unused),
        }


def diagnose(
    form: str,  # of the files, as `recording_from` finds it
    recording: Recording,
    *,
    stack: str | None = None,  # what runs the training: torch, megatron, primus or optpipe; by default that of the form
    layers: Sequence[int] = (),  # how many each stage has; one number for all, none if unknown
    memory: float | None = None,  # activations of one stage that a device may hold; by default as the fullest one held
    weight_share: float | None = None,  # W's of a backward that was measured whole, 0 to 1
    time_limit_s: float = 10.0,  # for the search of a schedule; 0 for none
    report: Progress = lambda _: None,  # called with what is tried
    limits: SolveArguments | None = None,  # further options of the search
) -> Diagnosis:
    """Where the time of the steps in a trace goes, and what to change. Raises InputError if no step is whole, or an
    argument does not fit."""
    chosen = STACK_OF_FORM[form] if stack is None else next((each for each in STACKS if each == stack), None)
    if chosen is None:
        near = did_you_mean(str(stack), STACKS, "; ")
        raise InputError(f"stack = {stack!r}: one of {', '.join(STACKS)} is expected{near}")
    if memory is not None and not 1 <= memory <= MOST_HELD:
        raise InputError(f"memory = {memory:g}: 1 to {MOST_HELD} activations are expected")
    if weight_share is not None and not 0 <= weight_share <= 1:
        raise InputError(f"weight_share = {weight_share:g}: a share from 0 to 1 is expected")
    runs = collect_runs(recording)
    if weight_share is not None and {Kind.W} & set(runs.kind.tolist()):
        unused = "the share of W that was given: B and W were measured apart"
        runs = replace(runs, unused=(*runs.unused, unused))
    counts = tuple(layers) * len(runs.where) if len(layers) == 1 else tuple(layers)
    losses = explain(runs)
    search: SolveArguments | None = {**(limits or {}), "time_limit_s": time_limit_s} if time_limit_s else None
    cures = find_cures(runs, losses, UserFacts(counts, memory, weight_share), chosen, search, report)
    return Diagnosis(form, chosen, runs, losses, cures)
