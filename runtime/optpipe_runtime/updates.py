"""`Updates`: what becomes of gradients and parameters between two steps: ties, clipping, optimizers on the host, and
updates that are validated later."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from optpipe.errors import InputError
from optpipe_runtime.arguments import require_equal
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.models.part import shared_parameters
from optpipe_runtime.post_validation import PostValidation, require_valid
from optpipe_runtime.ranks.clipping import clip
from optpipe_runtime.ranks.ties import Tie
from optpipe_runtime.step_runner import StepRunner


class Updates:
    """Those of one rank's stages. All methods but `synchronize` are collective.

    Parameters
    ----------
    rank, step_runner
        Of the pipeline. The step runner ends the steps of the ties and validations that are made here.
    stages
        This rank's modules. Parameters that stages of several ranks share are tied at once.
    clips_host_updates
        Whether updates on the host wait for `clip`.
    """

    def __init__(
        self, rank: Rank, step_runner: StepRunner, stages: Mapping[int, nn.Module], clips_host_updates: bool
    ) -> None:
        self._rank, self._ties, self._validations = rank, step_runner.ties, step_runner.validations
        self._clips_host_updates = clips_host_updates
        own = shared_parameters(stages)
        for key in sorted({key for keys in rank.cpu_group.gather(list(own)) for key in keys}):
            self._add_tie(own.get(key))

    def tie(self, copy: nn.Parameter | nn.Module | None) -> None:
        """As `Pipeline.tie`."""
        tied = copy.parameters() if isinstance(copy, nn.Module) else [] if copy is None else [copy]
        updated = [s for s, host in self._rank.host_optimizers.items() if not host.parameters.isdisjoint(tied)]
        for stages in self._rank.cpu_group.gather(updated):
            if stages:
                raise InputError(
                    f"tie: stage {stages[0]} has a copy, and updates it on the host before gradients are summed over "
                    "the copies: leave the stage out of host_optimizers"
                )
        self._add_tie(copy)

    def clip(self, max_norm: float, norm_type: float) -> float:
        """As `Pipeline.clip_grad_norm_`."""
        if not self._clips_host_updates:
            self._require_no_host_optimizers(
                "clip_grad_norm_: stages with host_optimizers are updated inside the step, before the norm of all "
                "gradients is known"
            )
        norm = clip(*self._gradients(), self._rank.cpu_group, max_norm, norm_type)
        for optimizer in self._rank.host_optimizers.values():
            optimizer.apply()
        return norm

    def validate(self, optimizer: torch.optim.Optimizer, max_norm: float | None) -> None:
        """As `Pipeline.post_validate`."""
        self._rank.cpu_group.on_each_rank(lambda: require_valid(optimizer, max_norm))
        require_equal(self._rank.cpu_group, max_norm=max_norm)
        self._require_no_host_optimizers(
            "post_validate: a step that updates stages on the host cannot be undone, so with host_optimizers the ranks "
            "meet before each step, and gain nothing by updates ahead of the norm"
        )
        self._validations.append(
            PostValidation(optimizer, max_norm, self._rank.team, self._rank.cpu_group, self._gradients)
        )

    def synchronize(self) -> None:
        """As `Pipeline.synchronize`."""
        for validation in self._validations:
            validation.settle()
        for optimizer in self._rank.host_optimizers.values():
            optimizer.synchronize()

    def _add_tie(self, copy: nn.Parameter | nn.Module | None) -> None:
        self._ties.append(Tie(copy, self._rank.cpu_group, self._rank.team))

    def _gradients(self) -> tuple[Mapping[str, nn.Parameter], Iterable[nn.Parameter]]:
        """The parameters here, by name, and those of them that another rank counts in a norm. For those that are
        updated on the host the copies there, which have the gradients."""
        on_host: dict[nn.Parameter, nn.Parameter] = {}
        for optimizer in self._rank.host_optimizers.values():
            on_host |= optimizer.gradients()
        parameters = {
            f"stage {s}: {name}": on_host.get(parameter, parameter)
            for s, stage in self._rank.stages.items()
            for name, parameter in stage.module.named_parameters()
        }
        return parameters, (parameter for tie in self._ties for parameter in tie.uncounted)

    def _require_no_host_optimizers(self, why: str) -> None:
        if not self._rank.cpu_group.minimum(not self._rank.host_optimizers)[0]:
            raise InputError(f"{why}: make the Pipeline with clip_host_updates=True, and use clip_grad_norm_")
