"""`Rules` of the list scheduler in `optpipe.dispatch`: stages in the order of the only route, else of their numbers."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from optpipe.model.arrays import Floats, Ints
from optpipe.model.figures import MOST_MS, Items, Ms
from optpipe.model.records import MOST_LEVELS, MOST_PARTS, Index, Record

Count = Annotated[int, Field(strict=True, ge=-1, le=2**20)]
Leaves = Annotated[int, Field(strict=True, ge=-(MOST_LEVELS * (MOST_PARTS + 1)), le=MOST_PARTS)]


class Rules(NamedTuple):
    """What tells one run of the list scheduler from another.

    Attributes
    ----------
    in_flight
        (S,) the most micro-batches between the start of their F and that of their B at each stage.
    wait_ms
        (2, S) how long a device waits for the F, the B of each stage rather than start another op that is ready, of
        lower priority.
    leaves
        (S, m) how many parts of each activation leave, if there is time for that; a number below 0 (`recomputed`) if it
        is computed again. Micro-batches stand in the order in which they enter.
    lead_ms
        (S,) how long before its backward is expected an activation begins to come back or to be recomputed; a
        checkpoint: before its recompute.
    order
        (m,) the micro-batches in the order in which they enter; each stage runs each kind of op in it.
    """

    in_flight: Ints
    wait_ms: Floats
    leaves: Ints
    lead_ms: Floats
    order: Ints

    def copy(self) -> Rules:
        return Rules(
            self.in_flight.copy(), self.wait_ms.copy(), self.leaves.copy(), self.lead_ms.copy(), self.order.copy()
        )


def recomputed(level: Any, parts: Any = 0) -> Any:
    """The number in `Rules.leaves` of an activation that is computed again by a level, while so many parts of its
    checkpoint leave; -1 for the first level alone. Of arrays, or of numbers where it is compiled."""
    return -(1 + level + MOST_LEVELS * parts)


def level_of(leaves: Any) -> Any:
    """The level that a number below 0 in `Rules.leaves` stands for."""
    return (-1 - leaves) % MOST_LEVELS


def parts_of(leaves: Any) -> Any:
    """How many parts of its checkpoint leave by a number below 0 in `Rules.leaves`."""
    return (-1 - leaves) // MOST_LEVELS


class RulesRecord(Record):
    """Rules on the wire."""

    in_flight: Items[Count]
    wait_ms: tuple[Items[Ms], Items[Ms]]
    leaves: Items[Items[Leaves]]
    lead_ms: Items[Ms]
    order: Items[Index]

    @model_validator(mode="after")
    def _of_one_shape(self) -> Self:
        stages = len(self.in_flight)
        rows = (*self.wait_ms, self.leaves, self.lead_ms)
        lengths = {len(row) for row in self.leaves}
        if any(len(row) != stages for row in rows) or len(lengths) != 1 or lengths == {0}:
            raise ValueError(f"values for {stages} stages were expected, and rows of one length in leaves")
        if sorted(self.order) != list(range(len(self.leaves[0]))):
            raise ValueError(f"order was expected to name each of {len(self.leaves[0])} micro-batches once")
        return self

    @classmethod
    def from_rules(cls, rules: Rules) -> RulesRecord:
        return cls(
            in_flight=rules.in_flight.tolist(),
            wait_ms=rules.wait_ms.clip(0.0, MOST_MS).tolist(),
            leaves=rules.leaves.tolist(),
            lead_ms=rules.lead_ms.clip(0.0, MOST_MS).tolist(),
            order=rules.order.tolist(),
        )

    def rules(self) -> Rules:
        return Rules(
            np.array(self.in_flight, dtype=np.int64),
            np.array(self.wait_ms, dtype=np.float64),
            np.array(self.leaves, dtype=np.int64).reshape(len(self.in_flight), -1),
            np.array(self.lead_ms, dtype=np.float64),
            np.array(self.order, dtype=np.int64),
        )
