"""`Rules` of the list scheduler in `optpipe.dispatch`: stages in the order of the only route."""

from __future__ import annotations

from typing import Annotated, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from optpipe.model.arrays import Floats, Ints
from optpipe.model.records import MOST_MS, Index, Items, Ms, Record

Count = Annotated[int, Field(strict=True, ge=-1, le=2**20)]


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
        (S, m) how many parts of each activation leave, if there is time for that; `RECOMPUTED` if it is computed again.
        Micro-batches stand in the order in which they enter.
    lead_ms
        (S,) how long before its backward is expected an activation begins to come back or to be recomputed.
    order
        (m,) the micro-batches in the order in which they enter.
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


RECOMPUTED = -1  # in `Rules.leaves`, in place of a number of parts


class RulesRecord(Record):
    """Rules on the wire."""

    in_flight: Items[Count]
    wait_ms: tuple[Items[Ms], Items[Ms]]
    leaves: Items[Items[Count]]
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
