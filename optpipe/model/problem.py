"""`Problem`: what is to be scheduled, in milliseconds (float) and bytes (int); file format `optpipe.problem/3`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from optpipe.files import read_file, write_file
from optpipe.model.costs import Costs
from optpipe.model.figures import EachMs, Items
from optpipe.model.records import Device, Document, Index, Message, Stage, StageCosts

MAX_MICROBATCHES, MAX_DEVICES, MAX_STAGES = 2**16, 4096, 4096
MAX_FORWARDS = 2**22  # stages × micro-batches; with more no computation here would end
MAX_PARTS = 2**24  # stages × micro-batches × offload_parts; even a short schedule makes tables of this size


class Problem(Document):
    """The pipeline to schedule.

    `Problem.load(path)` and `Problem.from_json(text)` read one and raise InputError if a field is wrong. Times are in
    ms, sizes in bytes.

    Attributes
    ----------
    format
        The file format.
    name
        A label: two problems that differ in it only are the same problem.
    microbatches
        How many micro-batches a batch is cut into.
    p2p_ms
        How long a message takes between two devices: one time, or a list with one for each micro-batch. It occupies
        neither.
    messages
        Pairs of devices between which messages take another time than `p2p_ms`.
    fixed_order
        Whether micro-batches enter in the order of their numbers, as some data loaders ask. They enter in any order
        otherwise.
    transfer_mode
        Whether a host link carries one transfer at a time, or one in each direction.
    devices
        The devices, numbered from 0.
    stages
        The stages, numbered from 0, each with its device and its costs.
    routes
        The stages that micro-batches pass, in order. None: one route over all stages in order.
    microbatch_routes
        By micro-batch the number of its route; required with several routes.
    overlap_factor
        How long a pair lasts, as a share of its two ops one after the other. None: ops make no pairs.
    layers
        The costs of the layers that the stages consist of, in order, so that a search may divide them anew.
    """

    WHAT = "problem"

    format: Literal["optpipe.problem/3"] = "optpipe.problem/3"
    name: Annotated[str, Field(max_length=200)] = ""
    microbatches: Annotated[int, Field(strict=True, ge=1, le=MAX_MICROBATCHES)]
    p2p_ms: EachMs = 0.0
    messages: Annotated[Items[Message], Field(max_length=MAX_DEVICES * 4)] | None = None
    fixed_order: bool = False
    transfer_mode: Literal["half_duplex", "full_duplex"] = "half_duplex"
    devices: Annotated[Items[Device], Field(min_length=1, max_length=MAX_DEVICES)]
    stages: Annotated[Items[Stage], Field(min_length=1, max_length=MAX_STAGES)]
    routes: Annotated[Items[Items[Index]], Field(min_length=1, max_length=256)] | None = None
    microbatch_routes: Items[Index] | None = None
    overlap_factor: Annotated[float, Field(strict=True, gt=0, le=1, allow_inf_nan=False)] | None = None
    layers: Annotated[Items[StageCosts], Field(min_length=1, max_length=4096)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Problem:
        for message in (
            self._list_complaint(),
            self._stage_complaint(),
            self._message_complaint(),
            self._route_complaint(),
            self._size_complaint(),
        ):
            if message:
                raise ValueError(message)
        return self

    def _costs(self) -> Iterator[tuple[str, StageCosts]]:
        """The stages and the layers, each with its place in the file."""
        for name, records in (("stages", self.stages), ("layers", self.layers or ())):
            yield from ((f"{name}[{i}]", costs) for i, costs in enumerate(records))

    def _stage_complaint(self) -> str | None:
        named = [(f"devices[{d}].peer", device.peer) for d, device in enumerate(self.devices)]
        named += [(f"stages[{s}].device", stage.device) for s, stage in enumerate(self.stages)]
        named += [
            (f"messages[{i}].{name}", getattr(message, name))
            for i, message in enumerate(self.messages or ())
            for name in ("sender", "receiver")
        ]
        for name, number in named:
            if number is not None and number >= len(self.devices):
                return f"{name} = {number}: there are {len(self.devices)} devices, numbered from 0"
        for d, device in enumerate(self.devices):
            if device.peer == d:
                return f"devices[{d}].peer = {d}: a device evicts to another one"
        for name, costs in self._costs():
            if complaint := costs.complaint():
                return f"{name}.{complaint}"
        for s, stage in enumerate(self.stages):
            if stage.can_evict and self.devices[stage.device].peer is None:
                return f"stages[{s}].evict_ms = {stage.evict_ms}: its device {stage.device} needs a peer to evict to"
        return None

    def _message_complaint(self) -> str | None:
        pairs = set()
        for i, message in enumerate(self.messages or ()):
            pair = message.sender, message.receiver
            if message.sender == message.receiver:
                return f"messages[{i}].receiver = {message.receiver}: a message goes to another device"
            if pair in pairs:
                return f"messages[{i}]: messages from device {pair[0]} to device {pair[1]} stand there twice"
            pairs.add(pair)
        return None

    def _list_complaint(self) -> str | None:
        """A list that has not one number for each micro-batch."""
        lists: list[tuple[str, Any]] = [("p2p_ms", self.p2p_ms)]
        lists += [(f"messages[{i}].ms", message.ms) for i, message in enumerate(self.messages or ())]
        lists += [(f"{name}.{field}", figures) for name, costs in self._costs() for field, figures in costs.lists()]
        for name, figures in lists:
            if isinstance(figures, tuple) and len(figures) != self.microbatches:
                return (
                    f"{name} has {len(figures)} entries: one number, or one for each of the {self.microbatches} "
                    "microbatches"
                )
        return None

    def _route_complaint(self) -> str | None:
        for r, route in enumerate(self.all_routes):
            if not route:
                return f"routes[{r}] is empty: a micro-batch passes at least one stage"
            for k, s in enumerate(route):
                if s >= len(self.stages):
                    return f"routes[{r}][{k}] = {s}: there are {len(self.stages)} stages, numbered from 0"
            if len(set(route)) < len(route):
                k = next(k for k, s in enumerate(route) if s in route[:k])
                return f"routes[{r}][{k}] = {route[k]}: a route passes a stage once"
        on_a_route = {s for route in self.all_routes for s in route}
        for s in range(len(self.stages)):
            if s not in on_a_route:
                return f"stages[{s}] is on no route: each stage is on at least one"
        chosen = self.microbatch_routes
        if chosen is None:
            if len(self.all_routes) > 1:
                return (
                    f"microbatch_routes is missing: with {len(self.all_routes)} routes it says which one "
                    "each micro-batch takes"
                )
            return None
        if len(chosen) != self.microbatches:
            return f"microbatch_routes has {len(chosen)} entries: there are {self.microbatches} microbatches"
        for j, r in enumerate(chosen):
            if r >= len(self.all_routes):
                return f"microbatch_routes[{j}] = {r}: there are {len(self.all_routes)} routes, numbered from 0"
        return None

    def _size_complaint(self) -> str | None:
        if len(self.stages) * self.microbatches > MAX_FORWARDS:
            return (
                f"microbatches = {self.microbatches}: times {len(self.stages)} stages, at most {MAX_FORWARDS} "
                "forward passes"
            )
        parts = max(stage.offload_parts for stage in self.stages)
        if len(self.stages) * self.microbatches * parts > MAX_PARTS:
            return (
                f"offload_parts = {parts}: times {len(self.stages)} stages and {self.microbatches} "
                f"microbatches, at most {MAX_PARTS} parts"
            )
        levels = max(len(stage.all_levels) for stage in self.stages)
        if len(self.stages) * self.microbatches * levels > MAX_FORWARDS:
            return (
                f"levels: {levels} of a stage, times {len(self.stages)} stages and {self.microbatches} microbatches, "
                f"at most {MAX_FORWARDS}"
            )
        total = sum(
            sum(figure) if isinstance(figure, tuple) else figure * self.microbatches
            for stage in self.stages
            for figure in (stage.activation_bytes, stage.saved_for_weight_bytes)
        )
        if total >= 2**62:
            return f"stages: {total} bytes of activations over all micro-batches, more than can be counted (2^62)"
        return None

    @property
    def all_routes(self) -> tuple[tuple[int, ...], ...]:
        """The routes; by default one, over all stages in order."""
        return self.routes if self.routes is not None else (tuple(range(len(self.stages))),)

    def route(self, microbatch: int) -> tuple[int, ...]:
        """The stages that a micro-batch passes, in order."""
        return self.all_routes[self.microbatch_routes[microbatch] if self.microbatch_routes else 0]

    def stages_on(self, device: int) -> list[int]:
        """The stages that a device runs."""
        return [s for s, stage in enumerate(self.stages) if stage.device == device]

    def with_memory_for(self, activations: float) -> Problem:
        """The problem with other budgets: each device can hold the activations of all its stages so many times.

        One activation is that of one stage and one micro-batch; of different micro-batches it is the largest.
        """
        largest = self.costs.activation.max(axis=1)
        whole = [int(largest[self.stages_on(d)].sum()) for d in range(len(self.devices))]
        budgets = [{"activation_budget_bytes": int(activations * nbytes)} for nbytes in whole]
        return self.replace(
            devices=[device.model_copy(update=budget) for device, budget in zip(self.devices, budgets, strict=True)]
        )

    def entering(self, order: Sequence[int]) -> Problem:
        """The problem with some of its micro-batches, or all in another order: number k is the one that is `order[k]`
        in this problem."""

        def chosen(figures: Any) -> Any:
            return tuple(figures[j] for j in order) if isinstance(figures, tuple) else figures

        def with_chosen(records: Sequence[StageCosts] | None) -> Any:
            return records and [costs.with_figures(chosen) for costs in records]

        return self.replace(
            microbatches=len(order),
            p2p_ms=chosen(self.p2p_ms),
            messages=self.messages and [each.model_copy(update={"ms": chosen(each.ms)}) for each in self.messages],
            microbatch_routes=chosen(self.microbatch_routes),
            stages=with_chosen(self.stages),
            layers=with_chosen(self.layers),
        )

    @cached_property
    def costs(self) -> Costs:
        """The figures as numpy arrays."""
        routes = self.microbatch_routes or [0] * self.microbatches
        return Costs.from_records(self.devices, self.stages, self.all_routes, routes, self.p2p_ms, self.messages or ())

    @cached_property
    def shared_links(self) -> dict[str, tuple[int, ...]]:
        """The links that several devices share, with those devices."""
        members: dict[str, tuple[int, ...]] = {}
        for d, device in enumerate(self.devices):
            if device.link is not None:
                members[device.link] = (*members.get(device.link, ()), d)
        return {link: devices for link, devices in members.items() if len(devices) > 1}

    def __copy__(self) -> Problem:
        """A copy without the cached arrays and hash: `model_copy(update=...)` changes its fields afterwards."""
        copied = super().__copy__()
        for name in ("costs", "shared_links", "sha256"):
            copied.__dict__.pop(name, None)
        return copied

    def replace(self, **changes: Any) -> Problem:
        """The problem with some fields changed, validated again."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return Problem.from_dict(fields | changes)

    def to_dict(self) -> dict[str, Any]:
        """The content of a problem file, without fields that are None."""
        content = self.model_dump(mode="json", exclude_none=True)
        if not self.fixed_order:
            del content["fixed_order"]
        return content

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    @cached_property
    def sha256(self) -> str:
        """The hash of the problem's canonical JSON, without the name, which is only a label."""
        content = {key: value for key, value in self.to_dict().items() if key != "name"}
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    @classmethod
    def load(cls, path: str | Path) -> Problem:
        """Reads a problem file. Raises InputError if it cannot be read or a field is wrong."""
        return cls.from_json(read_file(path), str(path))

    def save(self, path: str | Path) -> None:
        """Writes a problem file, whole or not at all. Raises InputError if it cannot be written."""
        write_file(path, self.to_json() + "\n")
