"""`Learner`: learns what passes between a pipeline's stages, by running each stage's forward, first to last on every
route."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from optpipe.errors import InputError
from optpipe_runtime.execute.batch import Batch
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.stage.io import Spec, StageIO
from optpipe_runtime.stage.learn import learn
from optpipe_runtime.torch_private.trees import tree_leaves


class Learner:
    """Fills in the `io` of the rank and of its stages, and remembers for which batch and modules."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._learned: tuple[Any, Any] | None = None  # by `_signature`

    @property
    def done(self) -> bool:
        """Whether anything has been learned."""
        return self._learned is not None

    def forget(self) -> None:
        """Makes the next step learn again."""
        self._learned = None

    def knows(self, batch: Batch) -> bool:
        """Whether the batch, the modules' modes and what is trained are on this rank as they were."""
        return self._learned == self._signature(batch)

    def knows_batch(self, batch: Batch) -> bool:
        """Whether the batch is on this rank as it was."""
        return self._learned is not None and self._learned[0] == self._signature(batch)[0]

    def learn(self, batch: Batch) -> None:
        """Collective: learns the shapes of what passes between the stages, and which gradients come back. Each inner
        peer learns its own; what decides about an op's collectives is agreed on."""
        self._learned = None
        layout = self._rank.layout
        for r, route in enumerate(layout.routes):
            learned: list[StageIO] = []
            for s in route:
                result: StageIO | InputError | None = None
                if layout.placement[s] == self._rank.number:
                    try:
                        result = self._stage(r, s, learned[-1].outputs if learned else None, batch)
                    except InputError as error:
                        result = error  # for all ranks, so that none waits for ever
                    except BaseException as error:
                        error.add_note(f"rank {self._rank.team.name} was learning stage {s}, by its first forward")
                        raise
                stage = self._rank.stages.get(s)
                answers = self._rank.cpu_group.gather_from_peers(
                    (result, stage and stage.norms_wait), layout.placement[s]
                )
                for answer, _ in answers:
                    if isinstance(answer, InputError):
                        raise answer
                if stage is not None:
                    stage.norms_wait = all(norms_wait for _, norms_wait in answers)
                learned.append(answers[self._rank.team.peer][0])
            needed = learned[-1].needed
            for s, io in zip(reversed(route), reversed(learned), strict=True):
                io = replace(io, needed=needed)
                self._rank.io[s, r] = io
                if s in self._rank.stages:
                    self._rank.stages[s].io[r] = io
                needed = io.asked
        self._learned = self._signature(batch)

    def _stage(self, r: int, s: int, specs: tuple[Spec, ...] | None, batch: Batch) -> StageIO:
        m = self._rank.layout.microbatches
        if specs is None:
            given = batch.cut_inputs(m)[0]
        else:
            given = tuple(spec.zeros(self._rank.device).requires_grad_(spec.requires_grad) for spec in specs)
        ends = s == self._rank.layout.routes[r][-1]
        target = batch.cut_targets(m)[0] if ends else None
        stage = self._rank.stages[s]
        io = learn(stage, given, target, r, begins=specs is None, kwargs=batch.cut_kwargs(s, m)[0])
        if stage.outside.reached and (s in self._rank.replicas.reduced or stage.outside.has_replicas):
            raise InputError(
                f"{stage.outside.reached[0]} is trained with stage {s} and not in its module, so its gradient would "
                "not be the mean over the replicas: put it into the module, inside of DistributedDataParallel or "
                "fully_shard"
            )
        return io

    def _signature(self, batch: Batch) -> tuple[Any, Any]:
        """Two keys: shapes and types of the batch, and autocast; the modes of modules and what is trained."""
        rank, stages = self._rank, self._rank.stages.values()
        values = [batch.inputs] * rank.takes_inputs + [batch.targets] * rank.takes_targets
        named = [batch.kwargs_of(s) for s in rank.stages] if batch.kwargs else []
        given = (
            [
                [(tuple(t.shape), t.dtype) if isinstance(t, torch.Tensor) else type(t) for t in tree_leaves(value)]
                for value in (*values, *named)
            ],
            [sorted(kwargs) for kwargs in named],
        )
        kind = rank.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return (given, autocast), (
            [part.training for stage in stages for part in stage.modules()],
            [parameter.requires_grad for stage in stages for parameter in stage.parameters()],
        )
