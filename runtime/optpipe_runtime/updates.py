"""`Updates`: what becomes of gradients and parameters between two steps: ties, clipping, and what features add."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from optpipe.errors import InputError
from optpipe_runtime.execute.handler import find_feature
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.features.post_validation import Counted, PostValidations
from optpipe_runtime.models.part import shared_parameters
from optpipe_runtime.ranks.clipping import clip
from optpipe_runtime.ranks.ties import Tie


class Updates:
    """Those of one rank's stages. All methods but `synchronize` are collective.

    `ties` takes the ties that are made here; the step runner starts and ends their steps. Parameters that stages of
    several ranks share are tied at once.
    """

    def __init__(self, rank: Rank, ties: list[Tie], stages: Mapping[int, nn.Module]) -> None:
        self._rank, self._ties = rank, ties
        shared = shared_parameters(stages)
        for key in sorted({key for keys in rank.cpu_group.gather(list(shared)) for key in keys}):
            self._add_tie(shared.get(key))

    def tie(self, copy: nn.Parameter | nn.Module | None) -> None:
        """As `Pipeline.tie`."""
        tied = list(copy.parameters()) if isinstance(copy, nn.Module) else [] if copy is None else [copy]
        for feature in self._rank.features:
            feature.require_tie(tied)
        self._add_tie(copy)

    def clip(self, max_norm: float, norm_type: float) -> float:
        """As `Pipeline.clip_grad_norm_`."""
        norm = clip(*self._counted(), self._rank.cpu_group, max_norm, norm_type)
        for feature in self._rank.features:
            feature.after_clipping()
        return norm

    def validate(self, optimizer: torch.optim.Optimizer, max_norm: float | None) -> None:
        """As `Pipeline.post_validate`."""
        validations = find_feature(self._rank.features, PostValidations)
        if validations is None:
            raise InputError("post_validate: this runtime was made without the feature")
        validations.add(optimizer, max_norm, self._counted)

    def synchronize(self) -> None:
        """As `Pipeline.synchronize`."""
        for feature in self._rank.features:
            feature.synchronize()

    def _add_tie(self, copy: nn.Parameter | nn.Module | None) -> None:
        self._ties.append(Tie(copy, self._rank.cpu_group, self._rank.team))

    def _counted(self) -> Counted:
        """The parameters here, by name, and those of them that another rank counts in a norm. For those that are
        updated elsewhere, what has their gradients."""
        elsewhere: dict[nn.Parameter, nn.Parameter] = {}
        for feature in self._rank.features:
            elsewhere |= feature.gradient_holders()
        parameters = {
            f"stage {s}: {name}": elsewhere.get(parameter, parameter)
            for s, stage in self._rank.stages.items()
            for name, parameter in stage.named_parameters().items()
        }
        return parameters, (parameter for tie in self._ties for parameter in tie.uncounted)
