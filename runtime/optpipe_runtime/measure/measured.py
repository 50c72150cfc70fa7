"""`Measured`: what a profile has found, and how several become one: those of inner peers, which count as one rank, and
those of micro-batches that differ.

A figure of a stage has one name, those of its levels as `cheap.recompute_ms`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

from optpipe.model.problem import Problem
from optpipe.model.records import Stage
from optpipe.steps.cost_model import ONCE
from optpipe_runtime.measure.together import LinkTimes
from optpipe_runtime.memory import pci
from optpipe_runtime.stage.trial import Spread

# Of several measurements the least counts: what certainly leaves, and what each device has.
DEVICE_LEAST = ("activation_budget_bytes", "host_memory_bytes")
LEAST = {"offload_bytes", "evict_bytes", *DEVICE_LEAST}


@dataclass(frozen=True)
class Measured:
    """What `profile` found: a problem with the medians, and how far the measurements spread."""

    problem: Problem
    stages: tuple[Mapping[str, Spread], ...]  # for each stage, of each of its times, by name
    links: Mapping[tuple[int, int], Spread]  # of a message's time from one rank to another
    places: tuple[pci.Place | None, ...]  # of each rank's GPU (its first inner peer's), where the system reports it
    host_links: tuple[str | None, ...]  # for each rank the one that it shares; empty if the system reports none

    def apart(self) -> list[str]:
        """A sentence for each host link that ranks share, but not in the problem."""
        lines = []
        for name in dict.fromkeys(filter(None, self.host_links)):
            ranks = [rank for rank, link in enumerate(self.host_links) if link == name]
            links = {self.problem.devices[rank].link for rank in ranks}
            if len(links) > 1 or None in links:
                lines.append(
                    f"ranks {', '.join(map(str, ranks))} share a host link, but not in the problem: with "
                    'links = "auto" their transfers take turns'
                )
        return lines


class Figures(NamedTuple):
    """What one rank has measured."""

    device: dict[str, Any]  # fields of the problem's device
    place: pci.Place | None
    costs: Mapping[int, dict[str, Any]]  # fields of each stage
    times: Mapping[int, Mapping[str, Spread]]  # of each stage, by field
    links: LinkTimes


def slowest(peers: Sequence[Figures]) -> Figures:
    """Inner peers as one rank: the longest times, the most bytes, the least of what devices have and offload."""
    if len(peers) == 1:
        return peers[0]
    first = peers[0]

    def merged(figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        names = [name for name in figures[0] if all(name in each for each in figures)]
        return {name: _pick(min if field_name(name) in LEAST else max, figures, name) for name in names}

    return Figures(
        device=merged([peer.device for peer in peers]),
        place=first.place,
        costs={s: merged([peer.costs[s] for peer in peers]) for s in first.costs},
        times={s: merged([peer.times[s] for peer in peers]) for s in first.times},
        links={pair: _pick(max, (peer.links for peer in peers), pair) for pair in first.links},
    )


def _pick(least_or_most: Callable[..., Any], figures: Iterable[Mapping[Any, Any]], name: Any) -> Any:
    values = [figure[name] for figure in figures if figure.get(name) is not None]
    return least_or_most(values) if values else None


def by_microbatch(profiles: Sequence[Measured], forms: Sequence[int]) -> Measured:
    """One profile of micro-batches that differ, from a profile of each form: figures are lists, where they differ. What
    only some can do, the others do in no time and without any effect; a spread is the widest."""
    problems = [profiled.problem for profiled in profiles]
    if len(problems) == 1 and len(forms) == problems[0].microbatches:
        return profiles[0]
    problem = problems[0].replace(
        microbatches=len(forms),
        stages=[_stage(each, forms) for each in zip(*(problem.stages for problem in problems), strict=True)],
        p2p_ms=_listed([problem.p2p_ms for problem in problems], forms),
        devices=[
            devices[0].model_copy(update={name: _pick(min, map(vars, devices), name) for name in DEVICE_LEAST})
            for devices in zip(*(problem.devices for problem in problems), strict=True)
        ],
    )
    return replace(
        profiles[0],
        problem=problem,
        stages=tuple(
            {
                name: max((spreads[name] for spreads in each if name in spreads), key=attrgetter("iqr_ms"))
                for name in each[0]
            }
            for each in zip(*(profiled.stages for profiled in profiles), strict=True)
        ),
        links={
            pair: max((profiled.links[pair] for profiled in profiles), key=attrgetter("iqr_ms"))
            for pair in profiles[0].links
        },
    )


def _stage(by_form: Sequence[Stage], forms: Sequence[int]) -> Stage:
    figures: dict[str, Any] = {"device": by_form[0].device}
    figures |= {name: getattr(by_form[0], name) for name in ONCE}  # what micro-batches do not differ in
    for name in dict.fromkeys(name for stage in by_form for name in _flat(stage)):
        if name not in figures:
            figures[name] = _listed([figure_or_nothing(stage, name) for stage in by_form], forms)
    return Stage.model_validate(nested(figures))


def _listed(by_form: Sequence[Any], forms: Sequence[int]) -> Any:
    """A number if all forms have the same, else one for each micro-batch."""
    return by_form[0] if len(set(by_form)) == 1 else tuple(by_form[form] for form in forms)


def figure_or_nothing(stage: Stage, name: str) -> Any:
    """A figure of a stage; of what it cannot do, what doing nothing takes."""
    nothing = {"recompute_ms": stage.forward_ms, "checkpoint_bytes": stage.activation_bytes}
    return _flat(stage).get(name, nothing.get(field_name(name), 0))


def _flat(stage: Stage) -> dict[str, Any]:
    """What a stage can do, each figure by one name, those of its levels as `cheap.recompute_ms`."""
    records = {"": stage} | {f"{level.name}.": level for level in stage.levels or ()}
    return {
        before + name: value
        for before, record in records.items()
        for name, value in record
        if value is not None and name not in ("levels", "name")
    }


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a stage, from what `_flat` returns."""
    fields: dict[str, Any] = {}
    levels: dict[str, dict[str, Any]] = {}
    for name, value in flat.items():
        level, _, field = name.rpartition(".")
        target = levels.setdefault(level, {"name": level}) if level else fields
        target[field] = value
    return fields | ({"levels": list(levels.values())} if levels else {})


def field_name(name: str) -> str:
    """Without the level that may stand before it."""
    return name.rpartition(".")[2]
