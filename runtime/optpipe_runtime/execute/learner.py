"""`Learner`: learns what passes between a pipeline's stages, by running each stage's forward, first to last on every
route, for each shape of micro-batch that does not follow from others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace

import torch

from optpipe.errors import InputError
from optpipe_runtime.execute.batch import Batch, BatchShapes, shape_of, together
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.stage.io import LearnedRoutes, RouteSpecs, Shape, Spec, StageIO, extremes_first
from optpipe_runtime.stage.runner import learn

Modes = tuple[int, ...]  # by rank


class Learner:
    """Fills in the `io` of the rank and of its stages for a step's micro-batches, and keeps what it has learned."""

    def __init__(self, rank: Rank, gather_all: Callable[[], None]) -> None:
        """`gather_all` makes the parameters of all stages whole; it is called before anything is learned."""
        self._rank, self._gather_all = rank, gather_all
        self._current: Sequence[BatchShapes] | None = None  # what all ranks had of the micro-batches that `io` is for
        self._stage_modes: Modes | None = None  # for which the stages themselves were learned
        # By modes, route, and kind of micro-batch.
        self._routes: dict[tuple[Modes, int, Hashable], LearnedRoutes] = defaultdict(LearnedRoutes)
        self._mode_numbers: dict[Hashable, int] = {}

    @property
    def done(self) -> bool:
        """Whether the rank's `io` is that of some micro-batches."""
        return self._current is not None

    def forget(self) -> None:
        """Lets the next step ask again what its micro-batches are."""
        self._current = None

    @property
    def varies(self) -> bool:
        """Whether the micro-batches that `io` is for were cut already, on any rank."""
        return any(shapes.microbatches for shapes in self._current or ())

    def is_current(self, batch: Batch, modes: bool = True) -> bool:
        """Whether the batch is on this rank as it was; with `modes` the modules' modes and what is trained, too."""
        if self._current is None:
            return False
        before, now = self._current[self._rank.cpu_group.rank], self.describe(batch)
        return before == (now if modes else now._replace(modes=before.modes))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """In this context `io` may become that of other micro-batches. Afterwards it is as it was."""
        before = self._current
        yield
        if before is not None and before is not self._current:
            self.take(before)

    def describe(self, batch: Batch) -> BatchShapes:
        """What this rank has of the batch. Raises `InputError` if it is none."""
        stages = self._rank.stages.values()
        modes = (
            tuple(part.training for stage in stages for part in stage.modules()),
            tuple(parameter.requires_grad for stage in stages for parameter in stage.parameters()),
        )
        count, rank = batch.count, self._rank
        inputs, targets, kwargs = rank.cut(batch, count or rank.microbatches)
        columns = [column for column in (inputs, targets, *kwargs.values()) if column]
        shapes = tuple(shape_of(row) for row in zip(*columns, strict=True))
        kind = rank.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        number = self._mode_numbers.setdefault(modes, len(self._mode_numbers))
        return BatchShapes(count, shapes if count else shapes[:1], autocast, number)

    def learn(self, batch: Batch, evaluating: bool = False) -> bool:
        """Collective: makes the rank's `io` that of the batch's micro-batches, and learns the shapes that do not follow
        from others. Returns whether it has learned any. Raises `InputError` on all ranks if a batch is none, or
        the ranks do not agree on the number of micro-batches."""
        self._current = None
        try:
            shapes: BatchShapes | InputError = self.describe(batch)
        except InputError as error:
            shapes = error
        return self.take(self._rank.cpu_group.gather(shapes), batch, evaluating)

    def take(
        self, answers: Sequence[BatchShapes | InputError], batch: Batch | None = None, evaluating: bool = False
    ) -> bool:
        """The same, from what all ranks have. Collective if a shape must be learned, which needs the batch."""
        self._current = None
        by_rank = []
        for answer in answers:
            if isinstance(answer, InputError):
                raise answer
            by_rank.append(answer)
        counts = {n: each.microbatches for n, each in enumerate(by_rank) if each.microbatches}
        first = next(iter(counts), 0)
        for n, count in counts.items():
            if count != counts[first]:
                name_of = self._rank.cpu_group.name_of
                raise InputError(
                    f"rank {name_of(first)} has {counts[first]} micro-batches and rank {name_of(n)} has {count}: all "
                    "ranks must give those of one step"
                )
        m = counts.get(first, self._rank.microbatches)
        self._rank.set_microbatches(m)
        modes = tuple(each.modes for each in by_rank)
        shapes = [together(by_rank, j) for j in range(m)]
        anew = self._stage_modes is None or not (evaluating or self._stage_modes == modes)
        if anew:  # the stages themselves are learned with the first shape
            for key in [key for key in self._routes if key[0] == modes]:
                del self._routes[key]
        # An evaluation, whose modes are others, may use what was learned for the training.
        usable = [modes, self._stage_modes] if evaluating and self._stage_modes is not None else [modes]
        missing = self._missing(shapes, usable)
        if missing and batch is None:
            return True
        stages: set[int] = set()
        if missing:
            self._gather_all()
        for r, shape, j in missing:
            if self._find(usable, r, shape) is None:  # not even by what was learned meanwhile
                assert batch is not None
                fresh = {s for s in self._rank.layout.routes[r] if anew and s not in stages}
                stages |= fresh
                self._routes[modes, r, shape.kind].add(shape.sizes, self._learn_route(r, j, batch, fresh))
        if anew:
            self._stage_modes = modes
        self._fill_in(shapes, usable, varies=bool(counts))
        self._current = by_rank
        return bool(missing)

    def _find(self, usable: Sequence[Modes], r: int, shape: Shape, varies: bool = False) -> RouteSpecs | None:
        """What passes on a route, by what was learned for one of these modes."""
        for modes in usable:
            learned = self._routes[modes, r, shape.kind]
            if (specs := learned.find(shape.sizes)) is not None:
                return learned.among_others(specs) if varies else specs
        return None

    def _missing(self, shapes: Sequence[Shape], usable: Sequence[Modes]) -> list[tuple[int, Shape, int]]:
        """What must perhaps be learned: route, shape and a micro-batch of it, the smallest and the largest first."""
        missing = []
        for r in range(len(self._rank.layout.routes)):
            on_route = [j for j, taken in enumerate(self._rank.layout.microbatch_routes) if taken == r] or [0]
            first = {shapes[j]: j for j in reversed(on_route) if self._find(usable, r, shapes[j]) is None}
            missing += [(r, shape, first[shape]) for shape in extremes_first(list(first))]
        return missing

    def _fill_in(self, shapes: Sequence[Shape], usable: Sequence[Modes], varies: bool) -> None:
        rank = self._rank
        routes = rank.layout.routes
        numbers = {shape: k for k, shape in enumerate(dict.fromkeys(shapes))}
        rank.forms = tuple(
            numbers[shape] * len(routes) + r for shape, r in zip(shapes, rank.layout.microbatch_routes, strict=True)
        )
        rank.io.clear()
        for stage in rank.stages.values():
            stage.io.clear()
        for shape, k in numbers.items():
            for r, route in enumerate(routes):
                for s, io in zip(route, self._find(usable, r, shape, varies) or (), strict=False):
                    form = k * len(routes) + r
                    rank.io[s, form] = io
                    if s in rank.stages:
                        rank.stages[s].io[form] = io

    def _learn_route(self, r: int, j: int, batch: Batch, fresh: Set[int]) -> RouteSpecs:
        """Collective: learns the shapes of what passes between the stages for micro-batch j, and which gradients come
        back; of `fresh` stages all else, too. Each inner peer learns its own; what decides about an op's collectives is
        agreed on."""
        rank = self._rank
        route = rank.layout.routes[r]
        learned: list[StageIO] = []
        for s in route:
            result: StageIO | InputError | None = None
            if rank.layout.placement[s] == rank.number:
                try:
                    result = self._stage(r, s, j, learned[-1].outputs if learned else None, batch, s in fresh)
                except InputError as error:
                    result = error  # for all ranks, so that none waits for ever
                except BaseException as error:
                    error.add_note(f"rank {rank.team.name} was learning stage {s}, by its first forward")
                    raise
            stage = rank.stages.get(s)
            answers = rank.cpu_group.gather_from_peers(
                (result, stage and stage.split.norms_wait), rank.layout.placement[s]
            )
            for answer, _ in answers:
                if isinstance(answer, InputError):
                    raise answer
            if stage is not None:
                stage.split.norms_wait = all(norms_wait for _, norms_wait in answers)
            learned.append(answers[rank.team.peer][0])
        needed = learned[-1].needed
        for k, io in reversed(list(enumerate(learned))):
            learned[k] = replace(io, needed=needed)
            needed = learned[k].asked
        return tuple(learned)

    def _stage(self, r: int, s: int, j: int, specs: tuple[Spec, ...] | None, batch: Batch, fresh: bool) -> StageIO:
        rank = self._rank
        data = rank.cut(batch, rank.layout.microbatches)
        if specs is None:
            inputs = data.inputs[j]
        else:
            inputs = tuple(spec.zeros(rank.device).requires_grad_(spec.requires_grad) for spec in specs)
        target = data.targets[j] if s == rank.layout.routes[r][-1] else None
        stage = rank.stages[s]
        io = learn(stage, inputs, target, r, begins=specs is None, kwargs=data.named(s, j), anew=fresh)
        if stage.outside.reached and (s in rank.replicas.reduced or stage.outside.has_replicas):
            raise InputError(
                f"{stage.outside.reached[0]} is trained with stage {s} and not in its module, so its gradient would "
                "not be the mean over the replicas: put it into the module, inside of DistributedDataParallel or "
                "fully_shard"
            )
        return io
