"""`Problem`: what is to be scheduled, in milliseconds (float) and bytes (int); file format `optpipe.problem/3`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from optpipe.files import write_file
from optpipe.model.arrays import Floats
from optpipe.model.costs import Costs
from optpipe.model.ops import BACKWARD, Kind
from optpipe.model.records import Device, Document, EachMs, Index, Items, Message, PairFactors, Stage, StageCosts

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
        How long a pair lasts, as a share of its two ops one after the other: one number, or a list by the stage of the
        forward of lists by the stage of the backward. None: ops make no pairs.
    layers
        The costs of the layers that the stages consist of, in order, so that a search may divide them anew.
    stack
        "torch": `saved_for_weight_bytes` are what PyTorch's own pipelining holds, where a stage is not the first one;
        there it is the activation. None: what OptPipe's runtime holds.
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
    overlap_factor: PairFactors | None = None
    layers: Annotated[Items[StageCosts], Field(min_length=1, max_length=4096)] | None = None
    stack: Literal["torch"] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Problem:
        for complaint in chain(
            self._wrong_lists(), self._wrong_stages(), self._wrong_messages(), self._wrong_routes(), self._wrong_sizes()
        ):
            raise ValueError(complaint)  # the first: later checks rely on earlier ones
        return self

    def _costs(self) -> Iterator[tuple[str, StageCosts]]:
        """The stages and the layers, each with its place in the file."""
        for name, records in (("stages", self.stages), ("layers", self.layers or ())):
            yield from ((f"{name}[{i}]", costs) for i, costs in enumerate(records))

    def _wrong_lists(self) -> Iterator[str]:
        lists: list[tuple[str, Any]] = [("p2p_ms", self.p2p_ms)]
        lists += [(f"messages[{i}].ms", message.ms) for i, message in enumerate(self.messages or ())]
        lists += [(f"{name}.{field}", figures) for name, costs in self._costs() for field, figures in costs.lists()]
        for name, figures in lists:
            if isinstance(figures, tuple) and len(figures) != self.microbatches:
                each = f"one for each of the {self.microbatches} microbatches"
                yield f"{name} has {len(figures)} entries: one number, or {each}"
        if isinstance(self.overlap_factor, tuple):
            each = f"one for each of the {len(self.stages)} stages, or one number for all pairs"
            rows = [(f"overlap_factor[{s}]", row) for s, row in enumerate(self.overlap_factor)]
            for name, row in [("overlap_factor", self.overlap_factor), *rows]:
                if len(row) != len(self.stages):
                    yield f"{name} has {len(row)} entries: {each}"

    def _wrong_stages(self) -> Iterator[str]:
        named = [(f"devices[{d}].peer", device.peer) for d, device in enumerate(self.devices)]
        named += [(f"stages[{s}].device", stage.device) for s, stage in enumerate(self.stages)]
        named += [
            (f"messages[{i}].{name}", getattr(message, name))
            for i, message in enumerate(self.messages or ())
            for name in ("sender", "receiver")
        ]
        for name, number in named:
            if number is not None and number >= len(self.devices):
                yield f"{name} = {number}: there are {len(self.devices)} devices, numbered from 0"
        for d, device in enumerate(self.devices):
            if device.peer == d:
                yield f"devices[{d}].peer = {d}: a device evicts to another one"
        for name, costs in self._costs():
            if complaint := costs.complaint():
                yield f"{name}.{complaint}"
        for s, stage in enumerate(self.stages):
            if stage.can_evict and self.devices[stage.device].peer is None:
                yield f"stages[{s}].evict_ms = {stage.evict_ms}: its device {stage.device} needs a peer to evict to"

    def _wrong_messages(self) -> Iterator[str]:
        pairs = set()
        for i, message in enumerate(self.messages or ()):
            pair = message.sender, message.receiver
            if message.sender == message.receiver:
                yield f"messages[{i}].receiver = {message.receiver}: a message goes to another device"
            if pair in pairs:
                yield f"messages[{i}]: messages from device {pair[0]} to device {pair[1]} stand there twice"
            pairs.add(pair)

    def _wrong_routes(self) -> Iterator[str]:
        routes, chosen = self.all_routes, self.microbatch_routes
        for r, route in enumerate(routes):
            if not route:
                yield f"routes[{r}] is empty: a micro-batch passes at least one stage"
            for k, s in enumerate(route):
                if s >= len(self.stages):
                    yield f"routes[{r}][{k}] = {s}: there are {len(self.stages)} stages, numbered from 0"
            if len(set(route)) < len(route):
                k = next(k for k, s in enumerate(route) if s in route[:k])
                yield f"routes[{r}][{k}] = {route[k]}: a route passes a stage once"
        for s in sorted(set(range(len(self.stages))).difference(*routes)):
            yield f"stages[{s}] is on no route: each stage is on at least one"
        if chosen is None:
            if len(routes) > 1:
                each = "which one each micro-batch takes"
                yield f"microbatch_routes is missing: with {len(routes)} routes it says {each}"
            return
        if len(chosen) != self.microbatches:
            yield f"microbatch_routes has {len(chosen)} entries: there are {self.microbatches} microbatches"
        for j, r in enumerate(chosen):
            if r >= len(routes):
                yield f"microbatch_routes[{j}] = {r}: there are {len(routes)} routes, numbered from 0"

    def _wrong_sizes(self) -> Iterator[str]:
        forwards = len(self.stages) * self.microbatches
        if forwards > MAX_FORWARDS:
            most = f"at most {MAX_FORWARDS} forward passes"
            yield f"microbatches = {self.microbatches}: times {len(self.stages)} stages, {most}"
        of_all = f"{len(self.stages)} stages and {self.microbatches} microbatches"
        parts = max(stage.offload_parts for stage in self.stages)
        if forwards * parts > MAX_PARTS:
            yield f"offload_parts = {parts}: times {of_all}, at most {MAX_PARTS} parts"
        levels = max(len(stage.all_levels) for stage in self.stages)
        if forwards * levels > MAX_FORWARDS:
            yield f"levels: {levels} of a stage, times {of_all}, at most {MAX_FORWARDS}"
        total = sum(
            sum(figure) if isinstance(figure, tuple) else figure * self.microbatches
            for stage in self.stages
            for figure in (stage.activation_bytes, stage.saved_for_weight_bytes)
        )
        if total >= 2**62:
            yield f"stages: {total} bytes of activations over all micro-batches, more than can be counted (2^62)"

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
        return self.replace(devices=[each.model_copy(update=b) for each, b in zip(self.devices, budgets, strict=True)])

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
        stages, routes = self.stages, self.microbatch_routes or [0] * self.microbatches
        if self.stack == "torch":  # where nothing comes before a stage its B does nothing
            later = {s for route in self.all_routes for s in route[1:]}
            stages = tuple(
                stage if s in later else stage.model_copy(update={"saved_for_weight_bytes": stage.activation_bytes})
                for s, stage in enumerate(stages)
            )
        return Costs.from_records(self.devices, stages, self.all_routes, routes, self.p2p_ms, self.messages or ())

    @cached_property
    def pair_factors(self) -> Floats:
        """(S, S) `overlap_factor` by the stages of a pair's forward and backward; 1 without it."""
        stages = len(self.stages)
        return np.broadcast_to(np.array(self.overlap_factor or 1.0), (stages, stages))

    @property
    def paired(self) -> frozenset[Kind]:
        """The backwards that pairs may have: BW alone where factors come from all-to-all beside all of its compute."""
        by_exchange = any(stage.forward_exchange is not None for stage in self.stages)
        return BACKWARD - {Kind.B} if by_exchange and isinstance(self.overlap_factor, tuple) else BACKWARD

    @cached_property
    def least_factors(self) -> tuple[Floats, Floats]:
        """(S,) each: the least factor of the pairs with each stage's forward, and with its backward."""
        if not isinstance(self.overlap_factor, tuple):
            return self.pair_factors[0], self.pair_factors[0]
        device = np.array([stage.device for stage in self.stages])
        factors = np.where(device[:, None] == device, self.pair_factors, 1.0)
        return factors.min(axis=1), factors.min(axis=0)

    @cached_property
    def shared_links(self) -> dict[str, tuple[int, ...]]:
        """The links that several devices share, with those devices."""
        members: dict[str, list[int]] = {}
        for d, device in enumerate(self.devices):
            if device.link is not None:
                members.setdefault(device.link, []).append(d)
        return {link: tuple(devices) for link, devices in members.items() if len(devices) > 1}

    def __copy__(self) -> Problem:
        """A copy without the cached arrays and hash: `model_copy(update=...)` changes its fields afterwards."""
        copied = super().__copy__()
        for name in ("costs", "pair_factors", "least_factors", "shared_links", "sha256"):
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

    def save(self, path: str | Path) -> None:
        """Writes a problem file, whole or not at all. Raises InputError if it cannot be written."""
        write_file(path, self.to_json() + "\n")


def offload_ratio(problem: Problem) -> list[float | None]:
    """k of each stage: the round trip of its activation over the time of its F, B and W (PipeOffload, Wan et al. 2025,
    section 1). If k is at most 1, the activation can leave and come back while the device computes.

    None if the stage cannot offload; infinity if its transfers take time and its compute takes none. Of different
    micro-batches all count together. Waiting for other devices on a shared link is not counted.
    """
    costs = problem.costs
    work_ms = costs.ms[[Kind.F, Kind.B, Kind.W]].sum(axis=(0, 2)) / problem.microbatches
    away_ms = costs.ms[[Kind.O, Kind.R]].sum(axis=(0, 2)) * costs.parts / problem.microbatches
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(away_ms > 0, away_ms / work_ms, 0.0).tolist()
    return [ratio if possible else None for ratio, possible in zip(ratios, costs.can_offload.tolist(), strict=True)]
