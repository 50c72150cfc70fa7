"""`Layout`: which rank has which stage, which stages each micro-batch passes, where ranks may evict activations to, and
which ranks share a host link."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, zip_longest
from typing import Any

from optpipe.model.problem import Problem

UNMEASURED_BYTES = 2**39  # stands for the size of an activation before it is measured


@dataclass(frozen=True)
class Layout:
    """How a pipeline is laid out over its ranks. Fields are as in a `Problem`."""

    placement: tuple[int, ...]  # the rank of each stage
    routes: tuple[tuple[int, ...], ...]  # each route's stages, in order
    microbatch_routes: tuple[int, ...]  # the route of each micro-batch
    peers: tuple[int | None, ...] = ()  # for each rank, the one that it may evict to; empty if there are none
    links: tuple[str | None, ...] = ()  # for each rank, the host link that it shares, None for one of its own
    full_duplex: bool = False  # a rank's offload and reload can run at the same time

    @classmethod
    def from_problem(cls, problem: Problem) -> Layout:
        """The layout of the pipeline that a problem describes."""
        routes = problem.microbatch_routes or (0,) * problem.microbatches
        peers = tuple(device.peer for device in problem.devices)
        links = tuple(device.link if device.link in problem.shared_links else None for device in problem.devices)
        return cls(
            tuple(stage.device for stage in problem.stages),
            problem.all_routes,
            routes,
            peers if any(peer is not None for peer in peers) else (),
            links if any(link is not None for link in links) else (),
            problem.transfer_mode == "full_duplex",
        )

    @classmethod
    def make(
        cls,
        placement: Sequence[int],
        microbatches: int,
        routes: Any = None,
        microbatch_routes: Any = None,
        peers: Any = None,
        links: Any = None,
        full_duplex: bool = False,
    ) -> Layout:
        """A layout from the arguments of `Pipeline`. Without routes every micro-batch passes all stages in order.
        Raises `InputError` if they do not make a valid problem."""
        taken = {"microbatches": microbatches, "routes": routes, "microbatch_routes": microbatch_routes}
        return cls.from_problem(_unmeasured(placement, peers, links, full_duplex, taken))

    def unmeasured(self) -> Problem:
        """A problem of this layout before anything is measured: ops take no time and memory is unlimited."""
        return _unmeasured(self.placement, self.peers, self.links, self.full_duplex, self.to_dict())

    @property
    def in_order(self) -> tuple[int, ...]:
        """All stages, in the order in which a route passes them, one route after the other."""
        return tuple(dict.fromkeys(s for route in self.routes for s in route))

    def to_dict(self) -> dict[str, Any]:
        """The fields of a problem that say how many micro-batches there are, and their routes."""
        if self.routes == (tuple(range(len(self.placement))),):
            return {"microbatches": self.microbatches}
        return {"microbatches": self.microbatches, "routes": self.routes, "microbatch_routes": self.microbatch_routes}

    @property
    def microbatches(self) -> int:
        return len(self.microbatch_routes)

    @cached_property
    def first(self) -> frozenset[int]:
        """The stages that take the batch's inputs."""
        return frozenset(route[0] for route in self.routes)

    @cached_property
    def last(self) -> frozenset[int]:
        """The stages that compute a loss."""
        return frozenset(route[-1] for route in self.routes)

    def with_microbatches(self, count: int) -> Layout:
        """The same pipeline for another number of micro-batches, on its only route."""
        return self if count == self.microbatches else replace(self, microbatch_routes=(0,) * count)

    def route(self, microbatch: int) -> tuple[int, ...]:
        """The stages that a micro-batch passes, in order."""
        return self.routes[self.microbatch_routes[microbatch]]

    def peer(self, rank: int) -> int | None:
        """The rank to which a rank may evict activations."""
        return self.peers[rank] if rank < len(self.peers) else None

    def link(self, rank: int) -> str | None:
        """The name of the host link that a rank shares with others; None if its link is its own."""
        return self.links[rank] if rank < len(self.links) else None

    @cached_property
    def shared_links(self) -> dict[str, tuple[int, ...]]:
        """The ranks that share each link, by its name."""
        return {
            name: tuple(r for r, k in enumerate(self.links) if k == name)
            for name in dict.fromkeys(self.links)
            if name is not None
        }

    def before(self, stage: int, microbatch: int) -> int | None:
        """The previous stage on the micro-batch's route; None for the first."""
        return self._before.get((self.microbatch_routes[microbatch], stage))

    def after(self, stage: int, microbatch: int) -> int | None:
        """The next stage on the micro-batch's route; None for the last."""
        return self.neighbour_after(stage, self.microbatch_routes[microbatch])

    def neighbour_after(self, stage: int, route: int) -> int | None:
        """The next stage on a route; None for the last."""
        return self._after.get((route, stage))

    @cached_property
    def _before(self) -> dict[tuple[int, int], int]:
        return {(route, after): stage for route, stage, after in self.neighbours()}

    @cached_property
    def _after(self) -> dict[tuple[int, int], int]:
        return {(route, stage): after for route, stage, after in self.neighbours()}

    def neighbours(self) -> Iterator[tuple[int, int, int]]:
        """Every two neighbouring stages of every route: the route, a stage, and the next one."""
        return ((r, a, b) for r, route in enumerate(self.routes) for a, b in pairwise(route))


def _unmeasured(
    placement: Sequence[int], peers: Any, links: Any, full_duplex: bool, taken: Mapping[str, Any]
) -> Problem:
    """`taken`: the micro-batches and their routes, as fields of a problem."""
    times = dict.fromkeys(("forward_ms", "backward_input_ms", "backward_weight_ms"), 0)
    costs = {**times, "activation_bytes": UNMEASURED_BYTES, "saved_for_weight_bytes": 0}
    alone = [None] * (max(placement) + 1)
    fields = {
        **taken,
        "transfer_mode": "full_duplex" if full_duplex else "half_duplex",
        "devices": [
            {"activation_budget_bytes": 2**53, "peer": peer, "link": link}
            for peer, link in zip_longest(peers or alone, links or alone)
        ],
        "stages": [{"device": rank, **costs} for rank in placement],
    }
    return Problem.from_dict(fields, "the pipeline")
