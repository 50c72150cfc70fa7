"""`Learner`: what passes between a pipeline's stages, learned by running each stage's forward once, first to last on
every route."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from optpipe.errors import InputError
from optpipe_runtime.execute.executor import cut
from optpipe_runtime.execute.stage import Passage, Spec, Tensors
from optpipe_runtime.ranks.rank import Rank


class Learner:
    """Fills in the rank's `passages` and those of its stages, and remembers what they were learned with."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._learned: tuple[Any, Any] | None = None  # by `_signature`

    @property
    def done(self) -> bool:
        """Whether anything has been learned."""
        return self._learned is not None

    def knows(self, inputs: Any, targets: Any) -> bool:
        """Whether the batch, modes and what is trained are on this rank as they were."""
        return self._learned == self._signature(inputs, targets)

    def knows_batch(self, inputs: Any, targets: Any) -> bool:
        return self._learned is not None and self._learned[0] == self._signature(inputs, targets)[0]

    def learn(self, inputs: Any, targets: Any) -> None:
        """Collective: learns the shapes of what passes between the stages, and which of it comes back as a gradient."""
        self._learned = None
        layout = self._rank.layout
        for r, route in enumerate(layout.routes):
            learned: list[Passage] = []
            for s in route:
                told: Passage | InputError | None = None
                if layout.placement[s] == self._rank.number:
                    try:
                        told = self._stage(r, s, learned[-1].outputs if learned else None, inputs, targets)
                    except InputError as error:
                        told = error  # told to all, so that none waits for ever
                    except BaseException as error:
                        error.add_note(f"rank {self._rank.number} was learning stage {s}, by its first forward")
                        raise
                told = self._rank.council.tell(told, layout.placement[s])
                if isinstance(told, InputError):
                    raise told
                assert told is not None
                learned.append(told)
            needed = learned[-1].needed
            for s, passage in zip(reversed(route), reversed(learned), strict=True):
                passage = replace(passage, needed=needed)
                self._rank.passages[s, r] = passage
                if s in self._rank.stages:
                    self._rank.stages[s].passages[r] = passage
                needed = passage.asked
        self._learned = self._signature(inputs, targets)

    def _stage(self, r: int, s: int, specs: tuple[Spec, ...] | None, inputs: Any, targets: Any) -> Passage:
        if specs is None:
            given = self._first(inputs, "inputs")
        else:
            given = tuple(spec.zeros(self._rank.device).requires_grad_(spec.requires_grad) for spec in specs)
        ends = s == self._rank.layout.routes[r][-1]
        return self._rank.stages[s].learn(
            given, self._first(targets, "targets") if ends else None, r, begins=specs is None
        )

    def _first(self, value: Any, what: str) -> Tensors:
        """The first micro-batch."""
        return cut(value, self._rank.layout.microbatches, what)[0]

    def _signature(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """Shapes and types of the batch, and of autocast; what modules and parameters are set to."""
        rank, modules = self._rank, [stage.module for stage in self._rank.stages.values()]
        batch = [inputs] * rank.takes_inputs + [targets] * rank.takes_targets
        tensors = [value if isinstance(value, tuple | list) else (value,) for value in batch]
        given = [
            [(tuple(t.shape), t.dtype) if isinstance(t, torch.Tensor) else None for t in group] for group in tensors
        ]
        kind = rank.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        modes = [part.training for module in modules for part in module.modules()]
        return (given, autocast), (
            modes,
            [parameter.requires_grad for module in modules for parameter in module.parameters()],
        )
