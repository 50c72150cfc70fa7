"""`Layout`: where a pipeline's stages are, which of them each micro-batch passes, where ranks may evict to, and which
share a host link."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, zip_longest
from typing import Any

from optpipe.model.problem import Problem

MOST = 2**39  # bytes of an activation that nobody has measured


@dataclass(frozen=True)
class Layout:
    """`placement`: the rank of each stage; `routes`, `microbatch_routes`, each rank's peer and the links that ranks
    share, as in a `Problem`."""

    placement: tuple[int, ...]
    routes: tuple[tuple[int, ...], ...]
    microbatch_routes: tuple[int, ...]
    peers: tuple[int | None, ...] = ()
    links: tuple[str | None, ...] = ()  # None: a rank's link is its own
    full_duplex: bool = False

    @classmethod
    def of(cls, problem: Problem) -> Layout:
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
        """Without routes every micro-batch passes all stages in order. Raises `InputError` where a problem could not
        have these."""
        return cls.of(_unmeasured(placement, microbatches, routes, microbatch_routes, peers, links, full_duplex))

    def unmeasured(self) -> Problem:
        """The problem before anything has been measured: no time, and room for whatever it takes."""
        ways = self.routes, self.microbatch_routes
        return _unmeasured(self.placement, self.microbatches, *ways, self.peers, self.links, self.full_duplex)

    def to_dict(self) -> dict[str, Any]:
        """The fields of a problem that say how many micro-batches go which way."""
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

    def route(self, microbatch: int) -> tuple[int, ...]:
        """The stages that a micro-batch passes, in order."""
        return self.routes[self.microbatch_routes[microbatch]]

    def peer(self, rank: int) -> int | None:
        """The rank that it may evict to."""
        return self.peers[rank] if rank < len(self.peers) else None

    def link(self, rank: int) -> str | None:
        """The name of the host link that it shares with other ranks."""
        return self.links[rank] if rank < len(self.links) else None

    @cached_property
    def shared_links(self) -> dict[str, tuple[int, ...]]:
        """The ranks that share each link."""
        return {
            name: tuple(r for r, k in enumerate(self.links) if k == name)
            for name in dict.fromkeys(self.links)
            if name is not None
        }

    def before(self, stage: int, microbatch: int) -> int | None:
        """The stage before on the micro-batch's route; None for its first."""
        return self._neighbours[self.microbatch_routes[microbatch]][stage][0]

    def after(self, stage: int, microbatch: int) -> int | None:
        """The stage after on the micro-batch's route; None for its last."""
        return self._neighbours[self.microbatch_routes[microbatch]][stage][1]

    @cached_property
    def _neighbours(self) -> list[dict[int, tuple[int | None, int | None]]]:
        return [
            {s: (a, b) for a, s, b in zip((None, *route), route, (*route[1:], None), strict=False)}
            for route in self.routes
        ]

    def passages(self) -> Iterator[tuple[int, int, int]]:
        """Every two neighbouring stages of every route: route, stage, the one after."""
        return ((r, a, b) for r, route in enumerate(self.routes) for a, b in pairwise(route))


def _unmeasured(
    placement: Sequence[int],
    microbatches: int,
    routes: Any,
    microbatch_routes: Any,
    peers: Any,
    links: Any,
    full_duplex: bool,
) -> Problem:
    nothing = {
        "forward_ms": 0,
        "backward_input_ms": 0,
        "backward_weight_ms": 0,
        "activation_bytes": MOST,
        "saved_for_weight_bytes": 0,
    }
    alone = [None] * (max(placement) + 1)
    fields = {
        "microbatches": microbatches,
        "transfer_mode": "full_duplex" if full_duplex else "half_duplex",
        "devices": [
            {"activation_budget_bytes": 2**53, "peer": peer, "link": link}
            for peer, link in zip_longest(peers or alone, links or alone)
        ],
        "stages": [{"device": rank, **nothing} for rank in placement],
        "routes": routes,
        "microbatch_routes": microbatch_routes,
    }
    return Problem.from_dict(fields, "the pipeline")
