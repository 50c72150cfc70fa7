"""Ops and their text form: `{stage}{kind}{microbatch}`, such as `0F3`, `2BW0`, `1O4.2`; a pair is `0F3+4BW1`.

What stands after the dot is the part of an O, D or R, and the level of a C: `1C4` is by level 0, `1C4.1` by level 1.

The letters are those of the zero-bubble papers, not PyTorch's: our `B` (input gradient) is PyTorch's `I`, and our `BW`
(both gradients) is PyTorch's `B`.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import NamedTuple

from optpipe.errors import InputError


class Kind(IntEnum):
    """What an op does."""

    F = 0  # forward
    B = 1  # input gradient
    W = 2  # weight gradient
    BW = 3  # both gradients, fused
    C = 4  # recompute
    O = 5  # offload to the host
    D = 6  # drop the device copy of what was offloaded
    R = 7  # reload from the host
    E = 8  # evict to the peer device
    L = 9  # load back from it
    A = 10  # accept, on the peer: make room for what is evicted
    V = 11  # vacate, on the peer: let that room go when the load has ended
    G = 12  # a stage's gradients to the host
    U = 13  # its optimizer's update there
    P = 14  # its parameters back to the device


COMPUTE = frozenset({Kind.F, Kind.B, Kind.W, Kind.BW, Kind.C})
BACKWARD = frozenset({Kind.B, Kind.BW})
MARKS = frozenset(
    {Kind.D, Kind.A, Kind.V}
)  # take no time: places on the compute stream where it waits, or memory changes
HOST_LINK = frozenset({Kind.O, Kind.R, Kind.G, Kind.P})
INWARD = frozenset({Kind.R, Kind.P})  # of these, from the host to the device
PEER_LINK = frozenset({Kind.E, Kind.L})
EVICTION = PEER_LINK | {Kind.A, Kind.V}
TRANSFERS = HOST_LINK | PEER_LINK | {Kind.U}  # what runs beside compute: on links, and on the host
OPTIMIZER = frozenset({Kind.G, Kind.U, Kind.P})  # once a stage and iteration, written with micro-batch 0

_NUMBER = r"(?:0|[1-9][0-9]{0,8})"
OP = re.compile(
    rf"({_NUMBER})(?:(BW|[FBWELAVGUP])({_NUMBER})|([CODR])({_NUMBER})(?:\.({_NUMBER}))?)"
)  # only C has levels, only O, D and R have parts


class Op(NamedTuple):
    """One op. `part` is 0 unless a stage's activation is offloaded in several parts (`offload_parts`); of a C it is the
    number of the level by which it computes the activation again (`levels`)."""

    kind: Kind
    stage: int
    microbatch: int
    part: int = 0

    @classmethod
    def parse(cls, text: str) -> Op:
        """Reads `0F3`. Raises InputError for anything that `str(op)` would not print; only `.0` is read, too."""
        match = OP.fullmatch(text)
        if not match:
            raise InputError(
                f"op {text[:40]!r}: expected stage, kind ({', '.join(kind.name for kind in Kind)}), micro-batch "
                "and, for O, D, R, a part, for C a level, like 0F3 or 1O4.2"
            )
        stage, whole, j, parted, k, part = match.groups()
        return cls(Kind[whole or parted], int(stage), int(j or k), int(part or 0))

    def __str__(self) -> str:
        part = f".{self.part}" if self.part else ""
        return f"{self.stage}{self.kind.name}{self.microbatch}{part}"


class Pair(NamedTuple):
    """Two compute ops that run together (DualPipe): a forward and a backward of another micro-batch."""

    first: Op
    second: Op

    def __str__(self) -> str:
        return f"{self.first}+{self.second}"


def parse_item(text: str) -> Op | Pair:
    """An entry of a program: an op, or two joined by `+`."""
    ops = [Op.parse(part) for part in text.split("+")]
    if len(ops) > 2:
        raise InputError(f"program entry {text[:40]!r}: at most two ops can run together")
    return ops[0] if len(ops) == 1 else Pair(*ops)
