"""Casts of a stage's parameters, under autocast."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from optpipe_runtime.torch_private.tensors import version


class Casts:
    """Makes each cast of a parameter once a step, for all micro-batches, for F and B; as torch does within an autocast
    context. Without `keep` it makes one at every use. `nbytes` is what the casts of the last step took."""

    def __init__(self, keep: bool = True) -> None:
        self.nbytes, self._keep = 0, keep
        self._made: dict[tuple[Tensor, torch.dtype], tuple[int, Tensor]] = {}

    def cast(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        if parameter.dtype == dtype:
            return parameter
        if not self._keep or type(parameter) is not nn.Parameter:  # a view is another tensor in every forward
            return parameter.to(dtype)
        seen, cast = self._made.get((parameter, dtype), (-1, parameter))
        if seen != version(parameter):
            cast = parameter.detach().to(dtype)
            self._made[parameter, dtype] = version(parameter), cast
        return cast

    def clear(self) -> None:
        """At the end of a step: parameters may change, and not every change counts as a version."""
        self.nbytes = sum(cast.nbytes for _, cast in self._made.values())
        self._made.clear()
