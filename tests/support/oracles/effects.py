"""Other tables of effects, to see every model follow the one that there is."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from optpipe.evaluate.effects import TABLE
from optpipe.model.ops import Kind, nothing

B, W = TABLE[Kind.B], TABLE[Kind.W]
TABLES = {
    "B takes and frees a workspace": {
        Kind.B: replace(B, takes=lambda x: B.takes(x) + x.activation, frees=lambda x: B.frees(x) + x.activation)
    },
    "W frees the activation": {
        Kind.B: replace(B, takes=lambda x: x.saved_for_weight, frees=nothing),
        Kind.W: replace(W, frees=lambda x: x.activation + x.saved_for_weight),
    },
    "W takes and frees a workspace": {
        Kind.W: replace(W, takes=lambda x: x.saved_for_weight, frees=lambda x: 2 * x.saved_for_weight)
    },
}


@contextmanager
def effects(name: str) -> Iterator[None]:
    """Puts other entries into the table for a while."""
    with pytest.MonkeyPatch.context() as patch:
        for kind, effect in TABLES[name].items():
            patch.setitem(TABLE, kind, effect)
        yield
