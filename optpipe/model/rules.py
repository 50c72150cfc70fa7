"""`Rules` of the list scheduler in `optpipe.dispatch`: stages in the order of the only route, else of their numbers."""

from __future__ import annotations

from typing import Annotated, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from optpipe.model.arrays import NONE, Floats, Ints
from optpipe.model.records import MOST_LEVELS, MOST_MS, MOST_PARTS, Index, Items, Ms, Record

EVICTED = NONE - 1  # in place of a level: the activation leaves for its device's peer

Count = Annotated[int, Field(strict=True, ge=-1, le=2**20)]
LevelOrNone = Annotated[int, Field(strict=True, ge=EVICTED, lt=MOST_LEVELS)]
Parts = Annotated[int, Field(strict=True, ge=0, le=MOST_PARTS)]


class Rules(NamedTuple):
    """What distinguishes one run of the list scheduler from another. In rows of (S, m) micro-batches stand in the order
    in which they enter."""

    in_flight: Ints  # (S,) the most micro-batches between the start of their F and that of their B at each stage
    wait_ms: Floats  # (2, S) how long a device waits for the F, the B of each stage rather than start a lower op
    level: Ints  # (S, m) the level by which each activation is recomputed, `NONE` if by none; or `EVICTED`
    parts: Ints  # (S, m) how many parts of each activation, or of its checkpoint, leave if there is time
    lead_ms: Floats  # (S,) how long before its backward an activation begins to come back or to be recomputed
    order: Ints  # (m,) the micro-batches in the order in which they enter; each stage runs each kind of op in it

    def copy(self) -> Rules:
        return Rules._make(array.copy() for array in self)


class RulesRecord(Record):
    """Rules on the wire."""

    in_flight: Items[Count]
    wait_ms: tuple[Items[Ms], Items[Ms]]
    level: Items[Items[LevelOrNone]]
    parts: Items[Items[Parts]]
    lead_ms: Items[Ms]
    order: Items[Index]

    @model_validator(mode="after")
    def _of_one_shape(self) -> Self:
        stages, microbatches = len(self.in_flight), len(self.order)
        columns = {len(each) for each in (*self.wait_ms, self.level, self.parts, self.lead_ms)}
        rows = {len(row) for row in (*self.level, *self.parts)}
        if (columns, rows) != ({stages}, {microbatches}):
            raise ValueError(
                f"level, parts: {stages} rows of {microbatches} were expected, as in_flight and order have"
            )
        if sorted(self.order) != list(range(microbatches)):
            raise ValueError(f"order was expected to name each of {microbatches} micro-batches once")
        return self

    @classmethod
    def from_rules(cls, rules: Rules) -> RulesRecord:
        clipped = rules._replace(wait_ms=rules.wait_ms.clip(0.0, MOST_MS), lead_ms=rules.lead_ms.clip(0.0, MOST_MS))
        return cls(**{name: array.tolist() for name, array in clipped._asdict().items()})

    def rules(self) -> Rules:
        times = "wait_ms", "lead_ms"
        return Rules._make(
            np.array(getattr(self, name), np.float64 if name in times else np.int64) for name in Rules._fields
        )
