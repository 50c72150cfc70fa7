"""`Team`: the ranks that train one model: those of a pipeline, numbered from 0, and their inner peers. With data
parallelism each replica is a team.

A team fails as one. A rank that fails writes the reason to the store of torch.distributed and closes its connections.
Whoever waits for it gets an error at once, reads the reason, and closes its own. So every rank raises the same
sentence. A rank that only takes long has not failed; one that is frozen is found after the timeout that the user gave
to `init_process_group`, which all groups made here take over.

torch offers no other way to end a wait on gloo: `abort` of a group leaves its waits alone (torch 2.13), and a wait with
a timeout ends the connection. On NCCL a thread aborts the team's groups (`ranks.watch`). Not measured.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from optpipe.errors import OptPipeError
from optpipe_runtime.ranks.grid import find_grid
from optpipe_runtime.ranks.subgroup import LostError, Subgroup
from optpipe_runtime.ranks.watch import GRACE_S, Watch, all_at_once
from optpipe_runtime.torch_private.groups import PrefixStore, Store, default_store, set_timeout, timeouts

ANSWER_S = 2.0  # a rank that has not written to the store by then is reported as gone
ABORT_S = 10.0  # how long a rank waits until its NCCL groups are aborted
MOST_BLOCKS = 4  # thread blocks, so multiprocessors, of one NCCL message: some 80 GB/s. Not measured
_ended: list[Team] = []  # teams whose connections are still to be closed


class Team:
    """The ranks of a pipeline, a process group (all ranks if there is none), and those of its inner peers' pipelines.
    Making a team or a subgroup is collective over the ranks of all teams.

    `ranks` are those of this rank's pipeline, in which it is `number`; `peer` is its number among its inner peers,
    whose ranks are `inner`. `everyone` has the ranks of all pipelines of the team, one pipeline after the other.

    All ranks must make torch's groups in the same order. (`use_local_synchronization` does not help: it names a group
    by how many groups each member has made before, so members with different histories would wait for ever.) So every
    team makes the same subgroups in the same order.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, inner: dist.ProcessGroup | DeviceMesh | None = None
    ) -> None:
        self._timeout = user_timeout()
        self._grid = find_grid(group, inner, self._timeout)
        pipelines, self.peer = self._grid.team, self._grid.peer
        self.ranks = list(pipelines[self.peer])  # their numbers in the default group
        self.number = self.ranks.index(dist.get_rank())
        self.everyone = [rank for pipeline in pipelines for rank in pipeline]
        self.inner = [pipeline[self.number] for pipeline in pipelines]
        self.failure: str | None = None  # why the team has ended
        self.steps = 0  # that this rank has ended
        self._subgroups: list[Subgroup] = []
        self._store: Store | None = None
        self._failing = threading.RLock()  # the main thread and the watching one may find a failure
        self._watch: Watch | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    def subgroup(self, members: Iterable[int], device: torch.device) -> Subgroup:
        """Collective: a process group of these members of the pipeline, for tensors on `device`. This rank need not be
        a member."""
        return self._subgroup(sorted(members), self.ranks, self._grid.pipelines, device)

    def whole(self) -> Subgroup:
        """Collective: a process group of everyone in the team, numbered as in `everyone`, for tensors on CPU."""
        teams = [[rank for pipeline in team for rank in pipeline] for team in self._grid.teams]
        return self._subgroup(range(len(self.everyone)), self.everyone, teams, torch.device("cpu"))

    def peers(self) -> Subgroup:
        """Collective: a process group of this rank and its inner peers, numbered as in `inner`, for tensors on CPU."""
        sides = [[pipeline[k] for pipeline in team] for team in self._grid.teams for k in range(self.size)]
        return self._subgroup(range(len(self.inner)), self.inner, sides, torch.device("cpu"))

    def _subgroup(
        self, chosen: Sequence[int], own_ranks: list[int], all_ranks: Sequence[Sequence[int]], device: torch.device
    ) -> Subgroup:
        number = own_ranks.index(dist.get_rank())
        for ranks in all_ranks:
            group = self._new_group([ranks[member] for member in chosen], on_gpus=device.type == "cuda")
            if list(ranks) == own_ranks:
                own_group = group
        while _ended:  # making a group is collective, so all ranks have finished with earlier teams
            _ended.pop()._close()
        if number in chosen:
            if self._store is None:  # a group's name is unique, and the same on all members
                self._store = PrefixStore(f"optpipe/{own_group.group_name}", default_store())
            self._subgroups.append(Subgroup(self, chosen, own_group, own_ranks))
            if device.type == "cuda":
                self._subgroups[-1].meet(device)
        if device.type == "cuda" and self._watch is None:  # on all ranks: each watches the next one
            self.watch()
        return self._subgroups[-1] if number in chosen else Subgroup(self, chosen, None, own_ranks)

    def _new_group(self, ranks: list[int], on_gpus: bool) -> Any:
        if not on_gpus:
            return dist.new_group(ranks, backend="gloo", timeout=self._timeout)
        timeout = self._timeout + timedelta(seconds=GRACE_S)
        return dist.new_group(ranks, backend="nccl", timeout=timeout, pg_options=nccl_options(timeout))

    def watch(self) -> None:
        """Starts to watch over the team from a thread. At least one group must have been made."""
        assert self._store is not None
        number, names = self.everyone.index(self.ranks[self.number]), [self.name_of(rank) for rank in self.everyone]
        self._watch = Watch(number, names, self._store.clone(), self._timeout.total_seconds(), self.fail)  # type: ignore[attr-defined]

    def end(self) -> None:
        """Marks the connections as no longer needed. They are closed when another team is made, because other ranks may
        still be in their last step."""
        if self._watch is not None:
            self._watch.stop()
        if self.failure is None and self._store is not None:
            with suppress(RuntimeError):  # the rank that hosts the store has ended before
                self._store.set(self._closed(self.ranks[self.number]), str(self.steps))
        _ended.append(self)

    @property
    def name(self) -> str:
        """How messages name this rank."""
        return self.name_of(self.ranks[self.number])

    def name_of(self, rank: int) -> str:
        """How messages name a rank of the team, given its number in the default group."""
        peer, number = divmod(self.everyone.index(rank), self.size)
        return f"{number} (inner peer {peer})" if len(self.inner) > 1 else str(number)

    # Failure

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Wraps what all ranks do together. An `OptPipeError` in here is one that all ranks raise; any other error ends
        the team."""
        if self.failure is not None:
            raise OptPipeError(f"this pipeline has failed, make a new one: {self.failure}")
        try:
            yield
        except LostError as lost:
            raise OptPipeError(self.fail(_message(lost), lost)) from lost
        except OptPipeError:
            raise
        except BaseException as error:
            if len(self.inner) > 1 and _disconnected(error):
                raise OptPipeError(self.fail(self.describe(error), LostError("an inner peer"))) from error
            self.fail(self.describe(error))
            raise

    @contextmanager
    def local(self) -> Iterator[None]:
        """Wraps what this rank does by itself while the others do their part. Any error ends the team."""
        try:
            yield
        except LostError:
            raise
        except OptPipeError as error:
            self.fail(self.describe(error))
            raise

    def require_alive(self) -> None:
        """Raises `LostError` if the team has failed. For waits that no closed connection ends."""
        if self.failure is not None:
            raise LostError(self.failure)

    def describe(self, error: BaseException) -> str:
        """Says where this rank was, if that is known, and what happened."""
        return _message(error) if hasattr(error, "__notes__") else f"rank {self.name}: {_message(error)}"

    def fail(self, why: str, lost: LostError | None = None) -> str:
        """Ends the team: tells the other ranks, and leaves none of them waiting. Returns the first failure, which all
        ranks report.

        With `lost` it is another rank that has failed. Unless that rank has told why, find out first which one it is.
        """
        with self._failing:
            if self.failure is None:
                self.failure = why
                try:
                    self.failure = self._first_reason(why) if lost is None else self._find_lost(why, lost)
                except RuntimeError:  # torch's DistError: the rank that hosts the store is gone
                    self.failure = why
                self._close()
            return self.failure

    def _first_reason(self, why: str) -> str:
        """Writes the reason to the store, unless another rank was first, and returns what is there."""
        assert self._store is not None
        return str(self._store.compare_set("why", "", why), "utf-8")

    def _find_lost(self, why: str, lost: LostError) -> str:
        """Names the ranks that are gone, or have closed their pipeline. Before a rank closes its connections it writes
        a reason to the store, or that it is still here; a rank that has written neither is gone."""
        assert self._store is not None
        self._store.set(f"here/{self.ranks[self.number]}", "")
        if closed := [rank for rank in self.everyone if self._store.check([self._closed(rank)])]:
            ended = int(self._store.get(self._closed(closed[0])))
            return self._first_reason(
                f"rank {self.name_of(closed[0])} closed its pipeline after step {ended}, and rank {self.name} goes on "
                f"with step {self.steps + 1}: give all ranks equally many batches"
            )
        absent = self._absent(lost.absent)
        if not absent and not self._store.check(["why"]):
            self._close()  # ranks that wait for this one get an error, and write that they are here
            until = time.monotonic() + ANSWER_S
            while (
                (absent := self._absent(self.everyone)) and time.monotonic() < until and not self._store.check(["why"])
            ):
                time.sleep(0.02)
        names = ", ".join(map(self.name_of, absent))
        return self._first_reason(
            f"rank{'s' * (len(absent) > 1)} {names} did not answer any more; {why}" if absent else why
        )

    @staticmethod
    def _closed(rank: int) -> str:
        """The key under which a rank that closes its pipeline writes how many steps it has ended."""
        return f"closed/{rank}"

    def _absent(self, ranks: Iterable[int]) -> list[int]:
        assert self._store is not None
        return [rank for rank in ranks if not self._store.check([f"here/{rank}"])]

    def _close(self) -> None:
        for subgroup in self._subgroups:
            if not subgroup.on_gpus:
                subgroup.close()
        all_at_once([subgroup.close for subgroup in self._subgroups if subgroup.on_gpus], ABORT_S)


def nccl_options(timeout: timedelta) -> Any:
    """The options of a group on GPUs. A message shares the GPU with compute, and is not urgent: it was sent ahead."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas, options.config.max_ctas = 1, MOST_BLOCKS
    set_timeout(options, timeout)
    return options


def user_timeout() -> timedelta:
    """The one that the user gave to `init_process_group`. Groups of a mesh do not have it, but torch's default."""
    everyone = dist.group.WORLD
    assert everyone is not None
    return min(timeouts(everyone), default=default_pg_timeout)


def _disconnected(error: BaseException) -> bool:
    """Whether a collective of the user's, inside a stage, has lost a rank."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo/" in str(error))


def _message(error: BaseException) -> str:
    """The error's first note, which says where it happened, and its text."""
    what = str(error) if isinstance(error, OptPipeError) else f"{type(error).__name__}: {error}"
    return ": ".join([*getattr(error, "__notes__", [])[:1], what])
