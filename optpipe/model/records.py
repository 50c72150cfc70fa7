"""The records of a problem file: devices, stages and layers, and the types of their fields."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from optpipe.errors import input_error

MOST_MS = 1e12
Ms = Annotated[float, Field(strict=True, ge=0, le=MOST_MS, allow_inf_nan=False)]
TotalMs = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]  # of many ops: any number
Bytes = Annotated[int, Field(strict=True, ge=0, le=2**53)]
Index = Annotated[int, Field(strict=True, ge=0, le=2**20)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
T = TypeVar("T")
Items = Annotated[
    tuple[T, ...], Field(fail_fast=True)
]  # only the first wrong item is reported: a hostile file has many

# Fields that a stage has all of or none of.
OFFLOAD, RECOMPUTE = ("offload_ms", "reload_ms", "offload_bytes"), ("recompute_ms", "checkpoint_bytes")
EVICTION, UPDATE = ("evict_ms", "load_ms", "evict_bytes"), ("gradient_out_ms", "update_ms", "parameters_in_ms")


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
    """

    activation_budget_bytes: Bytes
    link: Name | None = None
    host_memory_bytes: Bytes | None = None
    peer: Index | None = None


class StageCosts(Record):
    """What one stage, or one layer, costs per micro-batch. Times in ms, sizes in bytes.

    What is None, the stage cannot do.

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
    evict_ms, load_ms, evict_bytes
        To evict it to the device's peer: the times of the copies, and the bytes.
    gradient_out_ms, update_ms, parameters_in_ms
        To run the stage's optimizer on the host, once an iteration. That saves model state, which is no part of any
        activation budget.
    """

    forward_ms: Ms
    backward_input_ms: Ms
    backward_weight_ms: Ms
    activation_bytes: Bytes
    saved_for_weight_bytes: Bytes
    offload_ms: Ms | None = None
    reload_ms: Ms | None = None
    offload_bytes: Bytes | None = None
    offload_parts: Annotated[int, Field(strict=True, ge=1, le=64)] = 1
    recompute_ms: Ms | None = None
    checkpoint_bytes: Bytes | None = None
    evict_ms: Ms | None = None
    load_ms: Ms | None = None
    evict_bytes: Bytes | None = None
    gradient_out_ms: Ms | None = None
    update_ms: Ms | None = None
    parameters_in_ms: Ms | None = None

    @property
    def can_offload(self) -> bool:
        return self.offload_ms is not None

    @property
    def can_recompute(self) -> bool:
        return self.recompute_ms is not None

    @property
    def can_evict(self) -> bool:
        return self.evict_ms is not None

    @property
    def can_update(self) -> bool:
        return self.update_ms is not None

    def complaint(self) -> str | None:
        """The first thing wrong between the fields, as `field = value: what would be right`."""
        for group in (OFFLOAD, RECOMPUTE, EVICTION, UPDATE):
            missing = [name for name in group if getattr(self, name) is None]
            if 0 < len(missing) < len(group):
                given = next(name for name in group if name not in missing)
                return f"{missing[0]} is missing: a stage with {given} needs {' and '.join(missing)}, too"
        if self.offload_parts > 1 and not self.can_offload:
            return f"offload_parts = {self.offload_parts}: only a stage with offload_ms can be offloaded in parts"
        for name in ("offload_bytes", "checkpoint_bytes", "evict_bytes"):
            value = getattr(self, name)
            if value is not None and value > self.activation_bytes:
                return f"{name} = {value}: must be at most activation_bytes = {self.activation_bytes}"
        return None


class Stage(StageCosts):
    """A piece of the model on one device, with its costs (`StageCosts`).

    Attributes
    ----------
    device
        The number of the device that runs it.
    """

    device: Index
