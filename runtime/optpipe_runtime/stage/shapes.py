"""What passes between stages, by the shape of the micro-batch: learned, or derived from what was learned.

A micro-batch of a shape that was never seen need not be learned if it lies between learned ones, and if each size of
what passes is the same in all of them, or in proportion to a size of the micro-batch. Where these explanations of a
size disagree about the new shape, or there is none, it is learned. So only a stage whose outputs neither stay nor grow
in proportion between two learned shapes could be derived wrongly, and its next message is then refused by its sender.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from optpipe_runtime.stage.io import Spec, StageIO

MOST_KEPT = 1024  # shapes of one kind; the oldest go first

Dimensions = tuple[int, ...]
RouteSpecs = tuple[StageIO, ...]  # of each stage of a route, in order


class Shape(NamedTuple):
    """Of one micro-batch: all that all ranks give to it.

    Attributes
    ----------
    kind
        Types, names and numbers of dimensions: what does not change with lengths.
    sizes
        Every dimension of every tensor.
    """

    kind: Hashable
    sizes: Dimensions


class _Rule(NamedTuple):
    """One explanation of a size of what passes: `size` where the micro-batch's size with number `at` is `given`, and in
    proportion to it; of a constant `at` is None."""

    size: int
    given: int = 1
    at: int | None = None

    def of_sizes(self, sizes: Dimensions) -> int | None:
        """None if it is no whole number."""
        if self.at is None:
            return self.size
        whole, rest = divmod(self.size * sizes[self.at], self.given)
        return None if rest else whole


class LearnedRoutes:
    """What passes on one route, for micro-batches of one kind."""

    def __init__(self) -> None:
        self._learned: dict[Dimensions, RouteSpecs] = {}
        self._derived: dict[Dimensions, RouteSpecs | None] = {}  # since something was learned
        self._large: list[frozenset[int]] = []  # of each stage, the blocks that are large in any shape
        self._rules: list[list[_Rule]] | None = None  # None: nothing can be derived

    def add(self, sizes: Dimensions, passing: RouteSpecs) -> None:
        """What was learned of a shape."""
        self._learned[sizes] = passing
        self._derived.clear()
        if len(self._learned) > MOST_KEPT:
            del self._learned[next(iter(self._learned))]
        self._rules = self._explain()
        self._large = [
            frozenset(i for io in same_stage for i, nbytes in enumerate(io.block_bytes) if nbytes)
            for same_stage in zip(*self._learned.values(), strict=True)
        ]

    def find(self, sizes: Dimensions) -> RouteSpecs | None:
        """What passes for a shape; None if it must be learned."""
        if sizes in self._learned:
            return self._learned[sizes]
        if sizes not in self._derived:
            if len(self._derived) == MOST_KEPT:
                self._derived.clear()
            self._derived[sizes] = self._derive(sizes)
        return self._derived[sizes]

    def among_others(self, passing: RouteSpecs) -> RouteSpecs:
        """The same, in a step with micro-batches of other shapes."""
        return tuple(replace(io, large_elsewhere=large) for io, large in zip(passing, self._large, strict=True))

    def _derive(self, sizes: Dimensions) -> RouteSpecs | None:
        if self._rules is None or not self._lies_between(sizes):
            return None
        derived = []
        for rules in self._rules:
            candidates = {rule.of_sizes(sizes) for rule in rules}
            if len(candidates) != 1 or (size := candidates.pop()) is None:
                return None
            derived.append(size)
        return _resized(list(self._learned.values()), iter(derived))

    def _lies_between(self, sizes: Dimensions) -> bool:
        learned = zip(*self._learned, strict=True)
        return all(min(column) <= size <= max(column) for size, column in zip(sizes, learned, strict=True))

    def _explain(self) -> list[list[_Rule]] | None:
        """All rules for each size of what passes, in the order of `_sizes_of`."""
        passings = list(self._learned.values())
        if len(passings) < 2 or len({_without_sizes(passing) for passing in passings}) > 1:
            return None
        given = list(enumerate(zip(*self._learned, strict=True)))
        all_rules = []
        for column in zip(*map(_sizes_of, passings), strict=True):
            rules = [_Rule(column[0])] if len(set(column)) == 1 else []
            for at, sizes in given:
                if sizes[0] and all(a * sizes[0] == column[0] * b for a, b in zip(column, sizes, strict=True)):
                    rules.append(_Rule(column[0], sizes[0], at))
            all_rules.append(rules)
        return all_rules if all(all_rules) else None


def _specs(passing: RouteSpecs) -> Iterator[Spec]:
    for io in passing:
        yield from (*io.inputs, *io.outputs)


def _sizes_of(passing: RouteSpecs) -> Dimensions:
    return tuple(size for spec in _specs(passing) for size in spec.shape)


def _without_sizes(passing: RouteSpecs) -> Hashable:
    """What must be equal for shapes to be derived from each other."""
    return tuple(
        (io.begins, io.ends, io.reached, io.needed, tuple((len(s.shape), *s[1:]) for s in (*io.inputs, *io.outputs)))
        for io in passing
    )


def _resized(learned: Sequence[RouteSpecs], sizes: Iterator[int]) -> RouteSpecs:
    """What passes with these sizes. What only costs memory or a copy is as in the least favourable shape."""
    derived = []
    for same_stage in zip(*learned, strict=True):
        io: StageIO = same_stage[0]
        inputs, outputs = (
            tuple(spec._replace(shape=tuple(next(sizes) for _ in spec.shape)) for spec in specs)
            for specs in (io.inputs, io.outputs)
        )
        derived.append(
            replace(
                io,
                inputs=inputs,
                outputs=outputs,
                changes_inputs=any(each.changes_inputs for each in same_stage),
                as_torch=all(each.as_torch for each in same_stage),
                saved_outputs=frozenset().union(*(each.saved_outputs for each in same_stage)),
                shared_blocks=frozenset().union(*(each.shared_blocks for each in same_stage)),
                block_bytes=(),
            )
        )
    return tuple(derived)


def extremes_first(shapes: Sequence[Shape]) -> list[Shape]:
    """The order in which to learn shapes: once the smallest and the largest are known, others may follow from them."""
    rising = sorted(shapes, key=lambda shape: (sum(shape.sizes), shape.sizes))
    return [*rising[:1], *rising[:0:-1]]
