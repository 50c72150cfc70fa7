"""Ops: their kinds, with all that follows from a kind alone, and their text form.

A text is `{stage}{kind}{microbatch}`, such as `0F3`, `2BW0`, `1O4.2`; a pair is `0F3+4BW1`. What stands after the dot
is the part of an O, D or R, and the level of a C: `1C4` is by level 0, `1C4.1` by level 1.

The letters are those of the zero-bubble papers, not PyTorch's: our `B` (input gradient) is PyTorch's `I`, and our `BW`
(both gradients) is PyTorch's `B`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple

import numpy as np

from optpipe.errors import InputError
from optpipe.model.arrays import Ints


class Kind(IntEnum):
    """What an op does (`KINDS`)."""

    F = 0
    B = 1
    W = 2
    BW = 3
    C = 4
    O = 5
    D = 6
    R = 7
    E = 8
    L = 9
    A = 10
    V = 11
    G = 12
    U = 13
    P = 14


class Stream(Enum):
    """Where ops of a device run one after the other."""

    COMPUTE = "compute"
    OUT = "host link, from the device"
    IN = "host link, to the device"
    PEER = "link to the peer"
    HOST = "host"


@dataclass(frozen=True)
class ActivationSizes:
    """The bytes of activations, in arrays of one shape: what effects are written in."""

    activation: Ints
    saved_for_weight: Ints  # what stays saved from B until W
    kept: Ints  # what stays after F: the activation, or the checkpoint of the level by which it is recomputed
    moved: Ints  # of one transfer: the part of that, or what is evicted
    hosted: Ints  # in host memory when the backward starts


Bytes = Callable[[ActivationSizes], Ints]


def nothing(sizes: ActivationSizes) -> Ints:
    """No bytes."""
    return np.zeros(sizes.activation.shape, np.int64)


@dataclass(frozen=True)
class Effect:
    """What one kind of op takes at its start and frees at its end (`optpipe.evaluate.effects`)."""

    takes: Bytes = nothing
    frees: Bytes = nothing
    takes_on_host: Bytes = nothing
    frees_on_host: Bytes = nothing


class KindInfo(NamedTuple):
    """What follows from the kind of an op alone."""

    word: str  # what it is called in sentences and legends
    # It runs after these of the same stage and micro-batch, of which there must be one: the first kind or what is there
    # instead of it. What runs once an iteration runs after all of them.
    needs: tuple[Kind, ...] = ()
    missing: str = ""  # what is missing where none of these is there; by default what the first is called
    restored: tuple[Kind, ...] = ()  # it also runs after the last of these, if there are any
    across: Kind | None = None  # it also runs after this op of another device
    # Kinds of which there must be one, too, wherever it is, and what is wrong otherwise.
    completed: tuple[tuple[tuple[Kind, ...], str], ...] = ()
    stream: Stream = Stream.COMPUTE  # where it runs
    ms: tuple[str, ...] = ()  # a stage's fields of which its time is the sum; none if it takes none, or by its level
    effect: Effect = Effect()  # what it takes and frees
    in_parts: bool = False  # whether there is one for each part of an activation
    once: bool = False  # whether it runs once an iteration, written with micro-batch 0
    colour: str | None = None  # in pictures; None for what takes no time


F, B, W, BW, C, O, D, R, E, L, A, V, G, U, P = Kind
_KEPT, _LOST = "its device copy is never let go", "the backward misses its bytes"
_NOT_LEFT, _NOT_EVICTED = "nothing has left", "nothing is evicted"
_ON_HOST = "an optimizer on the host is G, U and P"

# The colours of compute ops, offload and reload are Okabe and Ito's, which people who do not see all colours tell
# apart; forward, backward and weight gradient also differ in grey print.
KINDS: dict[Kind, KindInfo] = {
    F: KindInfo(
        "forward",
        restored=(P,),
        ms=("forward_ms",),
        effect=Effect(takes=lambda x: x.activation, frees=lambda x: x.activation - x.kept),
        colour="#0072B2",
    ),
    B: KindInfo(
        "input gradient",
        needs=(F,),
        restored=(R, C, L),
        completed=(((W,), "a backward is split or fused"),),
        ms=("backward_input_ms",),
        effect=Effect(
            takes=lambda x: np.maximum(0, x.saved_for_weight - x.activation),
            frees=lambda x: np.maximum(0, x.activation - x.saved_for_weight),
            frees_on_host=lambda x: x.hosted,
        ),
        colour="#E69F00",
    ),
    W: KindInfo(
        "weight gradient",
        needs=(B, BW),
        completed=(((B,), "a backward is split or fused"),),
        ms=("backward_weight_ms",),
        effect=Effect(frees=lambda x: x.saved_for_weight),
        colour="#009E73",
    ),
    BW: KindInfo(
        "backward",
        needs=(F,),
        restored=(R, C, L),
        ms=("backward_input_ms", "backward_weight_ms"),
        effect=Effect(frees=lambda x: x.activation, frees_on_host=lambda x: x.hosted),
        colour="#D55E00",
    ),
    C: KindInfo(
        "recompute", needs=(F,), restored=(R,), effect=Effect(takes=lambda x: x.activation - x.kept), colour="#8C8C8C"
    ),
    O: KindInfo(
        "offload",
        needs=(F,),
        completed=(((D,), _KEPT), ((R,), _LOST)),
        stream=Stream.OUT,
        ms=("offload_ms",),
        effect=Effect(takes_on_host=lambda x: x.moved),
        in_parts=True,
        colour="#CC79A7",
    ),
    D: KindInfo(  # lets the device copy of what was offloaded or evicted go
        "drop",
        needs=(O, E),
        missing="offload or eviction",
        completed=(((O, E), _NOT_LEFT),),
        effect=Effect(frees=lambda x: x.moved),
        in_parts=True,
    ),
    R: KindInfo(
        "reload",
        needs=(D,),
        completed=(((O,), _NOT_LEFT),),
        stream=Stream.IN,
        ms=("reload_ms",),
        effect=Effect(takes=lambda x: x.moved),
        in_parts=True,
        colour="#56B4E9",
    ),
    E: KindInfo(
        "evict",
        needs=(F,),
        across=A,
        completed=(((D,), _KEPT), ((L,), _LOST), ((A,), "nothing makes room for it on the peer")),
        stream=Stream.PEER,
        ms=("evict_ms",),
        colour="#AA4499",
    ),
    L: KindInfo(
        "load",
        needs=(D,),
        completed=(((E,), _NOT_EVICTED),),
        stream=Stream.PEER,
        ms=("load_ms",),
        effect=Effect(takes=lambda x: x.moved),
        colour="#44AA99",
    ),
    A: KindInfo(  # makes room for what is evicted
        "room on the peer",
        completed=(((E,), _NOT_EVICTED), ((V,), "its room is never let go")),
        effect=Effect(takes=lambda x: x.moved),
    ),
    V: KindInfo(  # lets that room go when the load has ended
        "vacate",
        needs=(L,),
        restored=(A,),
        completed=(((E,), _NOT_EVICTED),),
        effect=Effect(frees=lambda x: x.moved),
    ),
    G: KindInfo(
        "gradients out",
        needs=(W, BW),
        completed=(((U,), _ON_HOST), ((P,), _ON_HOST)),
        stream=Stream.OUT,
        ms=("gradient_out_ms",),
        once=True,
        colour="#882255",
    ),
    U: KindInfo(
        "update on the host",
        needs=(G,),
        missing="gradients",
        completed=(((G,), _ON_HOST), ((P,), _ON_HOST)),
        stream=Stream.HOST,
        ms=("update_ms",),
        once=True,
        colour="#999933",
    ),
    P: KindInfo(
        "parameters in",
        completed=(((G,), _ON_HOST), ((U,), _ON_HOST)),
        stream=Stream.IN,
        ms=("parameters_in_ms",),
        once=True,
        colour="#332288",
    ),
}


def _kinds(which: Callable[[KindInfo], bool]) -> frozenset[Kind]:
    return frozenset(kind for kind, info in KINDS.items() if which(info))


MARKS = _kinds(lambda info: info.colour is None)  # places on the compute stream where it waits, or memory changes
COMPUTE = _kinds(lambda info: info.stream is Stream.COMPUTE) - MARKS
BACKWARD = frozenset({B, BW})
HOST_LINK = _kinds(lambda info: info.stream in (Stream.OUT, Stream.IN))
INWARD = _kinds(lambda info: info.stream is Stream.IN)
TRANSFERS = _kinds(lambda info: info.stream is not Stream.COMPUTE)  # what runs beside compute: on links, on the host
OPTIMIZER = _kinds(lambda info: info.once)
IN_PARTS = _kinds(lambda info: info.in_parts)

_NUMBER = r"(?:0|[1-9][0-9]{0,8})"
_NUMBERED = "".join(kind.name for kind in sorted(IN_PARTS | {C}))  # only C has levels, only O, D and R have parts
_LETTERS = "".join(kind.name for kind in KINDS if len(kind.name) == 1 and kind.name not in _NUMBERED)
OP = re.compile(rf"({_NUMBER})(?:(BW|[{_LETTERS}])({_NUMBER})|([{_NUMBERED}])({_NUMBER})(?:\.({_NUMBER}))?)")


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
