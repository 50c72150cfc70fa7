"""The records of a problem file: devices, stages and layers, with figures that are one number for all micro-batches, or
one for each."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from optpipe.errors import A_LIST, A_NUMBER, InputError, input_error
from optpipe.files import read_file

MOST_MS = 1e12
Ms = Annotated[float, Field(strict=True, ge=0, le=MOST_MS, allow_inf_nan=False)]
Bytes = Annotated[int, Field(strict=True, ge=0, le=2**53)]
T = TypeVar("T")
Number = TypeVar("Number", int, float)
# Only the first wrong item is reported: a hostile file has many.
Items = Annotated[tuple[T, ...], Field(fail_fast=True)]


def _form(value: Any) -> str:
    return A_LIST if isinstance(value, list | tuple) else A_NUMBER


# One for all micro-batches, or a list with one for each.
EachMs = Annotated[Annotated[Ms, Tag(A_NUMBER)] | Annotated[Items[Ms], Tag(A_LIST)], Discriminator(_form)]
EachBytes = Annotated[Annotated[Bytes, Tag(A_NUMBER)] | Annotated[Items[Bytes], Tag(A_LIST)], Discriminator(_form)]
Factor = Annotated[float, Field(strict=True, gt=0, le=1, allow_inf_nan=False)]
# One for all pairs, or a list with one list for the forward of each stage: a number for the backward of each stage.
PairFactors = Annotated[
    Annotated[Factor, Tag(A_NUMBER)] | Annotated[Items[Items[Factor]], Tag(A_LIST)], Discriminator(_form)
]
MOST_PARTS, MOST_LEVELS = 64, 8  # of a stage
TotalMs = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]  # of many ops: any number
Index = Annotated[int, Field(strict=True, ge=0, le=2**20)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
COMPUTE_MS = ("forward_ms", "backward_input_ms", "backward_weight_ms")  # the times of F, B and W
# Fields that a stage has all of or none of.
OFFLOAD, RECOMPUTE = ("offload_ms", "reload_ms", "offload_bytes"), ("recompute_ms", "checkpoint_bytes")
EVICTION, UPDATE = ("evict_ms", "load_ms", "evict_bytes"), ("gradient_out_ms", "update_ms", "parameters_in_ms")
EXCHANGE = ("forward_exchange", "backward_exchange")


def of_microbatch(figure: Number | tuple[Number, ...], microbatch: int) -> Number:
    """The figure of one micro-batch."""
    return figure[microbatch] if isinstance(figure, tuple) else figure


def each_microbatch(combine: Callable[..., Any], *figures: Any) -> Any:
    """Figures combined for each micro-batch: one number if each of them is one, else a tuple."""
    lengths = [len(figure) for figure in figures if isinstance(figure, tuple)]
    if not lengths:
        return combine(*figures)
    return tuple(combine(*(of_microbatch(figure, j) for figure in figures)) for j in range(max(lengths)))


def one_for_all(figure: Number | tuple[Number, ...]) -> Number:
    """The figure where all micro-batches have the same one. Raises InputError where they differ."""
    numbers = set(figure if isinstance(figure, tuple) else (figure,))
    if len(numbers) > 1:
        raise InputError("micro-batches differ here: a problem with one number for each figure was expected")
    return numbers.pop()


class Record(BaseModel):
    """Strict and frozen: unknown fields, NaN, infinity and negative numbers are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Document(Record):
    """A record that users write. What is wrong with it is an InputError of one sentence, which begins with `what`."""

    WHAT: ClassVar[str]

    @classmethod
    def from_dict(cls, content: Any, what: str | None = None) -> Self:
        """The record with these fields. Raises InputError if one is wrong, missing or unknown."""
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise input_error(error, what or cls.WHAT, cls) from None

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a file. Raises InputError if it cannot be read or is not of this format."""
        return cls.from_json(read_file(path), str(path))

    @classmethod
    def from_json(cls, text: str | bytes, what: str | None = None) -> Self:
        """The record of a JSON text. Raises InputError if it is not JSON or a field is wrong, missing or unknown."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise input_error(error, what or cls.WHAT, cls) from None


class Device(Record):
    """A GPU.

    Attributes
    ----------
    activation_budget_bytes
        What it has for activations, after weights, gradients, optimizer state and workspace.
    link
        Devices with the same name here share a host link. None: a link of its own.
    host_memory_bytes
        Its share of pinned host memory. None: no limit.
    peer
        The device to which it may evict activations, or None.
    node
        Its machine. Devices with the same name here share host memory: their peaks add up to no more than their shares.
    """

    activation_budget_bytes: Bytes
    link: Name | None = None
    host_memory_bytes: Bytes | None = None
    peer: Index | None = None
    node: Name | None = None


class Message(Record):
    """How long messages from one device to another take, where that differs from `p2p_ms`.

    Attributes
    ----------
    sender, receiver
        The devices.
    ms
        One time for all micro-batches, or a list with one for each.
    """

    sender: Index
    receiver: Index
    ms: EachMs


class Level(Record):
    """One way to drop an activation and compute it again: PipeOffload's appendix C, Megatron's selective and full.

    Attributes
    ----------
    name
        Such as `cheap`, `selective`, `full`.
    recompute_ms, checkpoint_bytes
        The time to compute the activation again, and the bytes that stay until then.
    offload_ms, reload_ms, offload_bytes
        To offload the checkpoint as well: the times of its copies, and the bytes that it frees. None: it stays.
    """

    name: Name
    recompute_ms: EachMs
    checkpoint_bytes: EachBytes
    offload_ms: EachMs | None = None
    reload_ms: EachMs | None = None
    offload_bytes: EachBytes | None = None

    @property
    def can_offload(self) -> bool:
        return self.offload_ms is not None

    def complaint(self, activation_bytes: EachBytes) -> str | None:
        """The first thing wrong between the fields, of a level of an activation of this size."""
        return (
            _incomplete("level", self, OFFLOAD)
            or _first_larger("checkpoint_bytes", self.checkpoint_bytes, "activation_bytes", activation_bytes)
            or _first_larger("offload_bytes", self.offload_bytes, "checkpoint_bytes", self.checkpoint_bytes)
        )


class StageCosts(Record):
    """What one stage, or one layer, costs per micro-batch. Times in ms, sizes in bytes.

    Each figure is one number for all micro-batches or a list with one for each; what happens once an iteration and
    `offload_parts` are numbers. What is None, the stage cannot do.

    Attributes
    ----------
    forward_ms, backward_input_ms, backward_weight_ms
        The times of F, B and W.
    activation_bytes
        What F saves.
    saved_for_weight_bytes
        What of it stays from B until W.
    offload_ms, reload_ms, offload_bytes
        To offload the activation to the host: the times of its copies, and the bytes that it frees.
    offload_parts
        In how many equal parts it may be offloaded, each on its own.
    recompute_ms, checkpoint_bytes
        To drop the activation and compute it again: the time, and the bytes that stay.
    levels
        Several ways to do that, in place of these two fields; each activation takes one of them, or none.
    evict_ms, load_ms, evict_bytes
        To evict it to the device's peer: the times of the copies, and the bytes.
    gradient_out_ms, update_ms, parameters_in_ms
        To run the stage's optimizer on the host, once an iteration. That saves model state, which is no part of any
        activation budget.
    forward_exchange, backward_exchange
        The shares of F and of B that are all-to-all between experts, which a pair hides (`pair_factors`).
    """

    forward_ms: EachMs
    backward_input_ms: EachMs
    backward_weight_ms: EachMs
    activation_bytes: EachBytes
    saved_for_weight_bytes: EachBytes
    offload_ms: EachMs | None = None
    reload_ms: EachMs | None = None
    offload_bytes: EachBytes | None = None
    offload_parts: Annotated[int, Field(strict=True, ge=1, le=MOST_PARTS)] = 1
    recompute_ms: EachMs | None = None
    checkpoint_bytes: EachBytes | None = None
    levels: Annotated[Items[Level], Field(min_length=1, max_length=MOST_LEVELS)] | None = None
    evict_ms: EachMs | None = None
    load_ms: EachMs | None = None
    evict_bytes: EachBytes | None = None
    gradient_out_ms: Ms | None = None
    update_ms: Ms | None = None
    parameters_in_ms: Ms | None = None
    forward_exchange: Annotated[float, Field(strict=True, ge=0, le=1)] | None = None
    backward_exchange: Annotated[float, Field(strict=True, ge=0, le=1)] | None = None

    @property
    def can_offload(self) -> bool:
        return self.offload_ms is not None

    @property
    def can_recompute(self) -> bool:
        return bool(self.all_levels)

    @property
    def all_levels(self) -> tuple[Level, ...]:
        """The levels; `recompute_ms` and `checkpoint_bytes` are one, named `full`."""
        if self.recompute_ms is None or self.checkpoint_bytes is None:
            return self.levels or ()
        return (Level(name="full", recompute_ms=self.recompute_ms, checkpoint_bytes=self.checkpoint_bytes),)

    @property
    def can_offload_checkpoints(self) -> bool:
        """Whether that of any level can leave."""
        return any(level.can_offload for level in self.levels or ())

    @property
    def can_evict(self) -> bool:
        return self.evict_ms is not None

    @property
    def can_update(self) -> bool:
        return self.update_ms is not None

    def complaint(self) -> str | None:
        """The first thing wrong between the fields, as `field = value: what would be right`."""
        for group in (OFFLOAD, RECOMPUTE, EVICTION, UPDATE, EXCHANGE):
            if incomplete := _incomplete("stage", self, group):
                return incomplete
        if self.offload_parts > 1 and not (self.can_offload or self.can_offload_checkpoints):
            return f"offload_parts = {self.offload_parts}: only a stage with offload_ms can be offloaded in parts"
        if self.recompute_ms is not None and self.levels is not None:
            return f"recompute_ms = {self.recompute_ms}: a stage with levels has the time of each of them there"
        for name in ("offload_bytes", "checkpoint_bytes", "evict_bytes"):
            if larger := _first_larger(name, getattr(self, name), "activation_bytes", self.activation_bytes):
                return larger
        names = [level.name for level in self.levels or ()]
        for i, level in enumerate(self.levels or ()):
            if names.index(level.name) < i:
                return f"levels[{i}].name = {level.name!r}: the levels of a stage have different names"
            if complaint := level.complaint(self.activation_bytes):
                return f"levels[{i}].{complaint}"
        return None

    def of_microbatch(self, microbatch: int) -> Self:
        """The costs of one micro-batch, each figure one number."""
        return self.with_figures(lambda figures: figures[microbatch])

    def with_figures(self, change: Callable[[tuple[Any, ...]], Any]) -> Self:
        """The costs with each list that has a number for each micro-batch changed, those of levels as well."""
        update: dict[str, Any] = {name: change(figures) for name, figures in _lists(self)}
        if self.levels is not None:
            update["levels"] = tuple(
                level.model_copy(update={name: change(figures) for name, figures in _lists(level)})
                for level in self.levels
            )
        return self.model_copy(update=update)

    def lists(self) -> Iterator[tuple[str, tuple[float, ...]]]:
        """The names and values of the figures with a number for each micro-batch, such as `levels[1].reload_ms`."""
        yield from _lists(self)
        for i, level in enumerate(self.levels or ()):
            yield from ((f"levels[{i}].{name}", figures) for name, figures in _lists(level))


def _lists(record: Record) -> Iterator[tuple[str, tuple[float, ...]]]:
    """The names and values of a record's own figures that have a number for each micro-batch."""
    for name in type(record).model_fields:
        if isinstance(value := getattr(record, name), tuple) and name != "levels":
            yield name, value


def _incomplete(what: str, record: Record, group: Sequence[str]) -> str | None:
    """The complaint about fields of which some are there, some missing."""
    missing = [name for name in group if getattr(record, name) is None]
    if 0 < len(missing) < len(group):
        given = next(name for name in group if name not in missing)
        return f"{missing[0]} is missing: a {what} with {given} needs {' and '.join(missing)}, too"
    return None


def _first_larger(name: str, value: Any, whole_name: str, whole: Any) -> str | None:
    """The complaint about the first micro-batch of which more bytes leave or stay than there are."""
    if value is None:
        return None
    larger = each_microbatch(operator.gt, value, whole)
    for j, is_larger in enumerate(larger if isinstance(larger, tuple) else (larger,)):
        if is_larger:
            index, of_whole = (f"[{j}]" * isinstance(figure, tuple) for figure in (value, whole))
            given, most = of_microbatch(value, j), of_microbatch(whole, j)
            return f"{name}{index} = {given}: must be at most {whole_name}{of_whole} = {most}"
    return None


class Stage(StageCosts):
    """A piece of the model on one device, with its costs (`StageCosts`).

    Attributes
    ----------
    device
        The number of the device that runs it.
    """

    device: Index
