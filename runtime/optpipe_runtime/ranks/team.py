"""`Team`: the ranks of one pipeline, numbered from 0. Where replicas of a pipeline train side by side (data parallel),
each is a team.

A team fails as one. A rank that fails says why in the store of torch.distributed and closes its connections: whoever
waits for it, or comes to wait, has an error at once, reads why, and closes its own. So within moments no rank waits for
any other, whether the first one raised or was killed, and every rank raises the same sentence. Nothing is watched
meanwhile: a rank that only takes long is no failure.

torch offers no other way to end a wait on gloo: a work cannot be aborted, `abort` of a group leaves its waits alone
(2.13), and a wait with a timeout ends the connection. On NCCL, where a group's `abort` ends its works, the same steps
are taken; not measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import combinations
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from optpipe.errors import InputError, OptPipeError

ROLL_CALL_S = 2.0  # a rank that has not answered by then is said to be gone
_ended: list[Team] = []


class LostError(OptPipeError):
    """A rank did not answer: its connection is closed, or it was silent for as long as torch waits (30 minutes).

    `absent`: those of the team to whom this rank has no connection any more, as far as it knows.
    """

    def __init__(self, why: str, absent: Sequence[int] = ()) -> None:
        super().__init__(why)
        self.absent = absent


class Team:
    """The ranks of a process group; without one, all. Making one, and a subgroup, is collective over the ranks of all
    teams.

    torch's groups are made by all ranks in the same order (`use_local_synchronization` names a group by how many each
    member has made before, so that members with other pasts wait for ever), so teams are replicas: each makes the same
    subgroups in the same order.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._teams = _teams(group)
        self.ranks = dist.get_process_group_ranks(group)  # as the default group numbers them
        self.number = dist.get_rank(group)
        self.failure: str | None = None  # what ended it
        self._subgroups: list[Subgroup] = []
        self._notices: Store | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    def subgroup(self, members: Iterable[int], device: torch.device) -> Subgroup:
        """Connections of their own for tensors on `device`, among these members of this team, which need not include
        this rank."""
        chosen = sorted(members)
        for team in self._teams:
            made = dist.new_group(
                [team[member] for member in chosen], backend="nccl" if device.type == "cuda" else "gloo"
            )
            if team == self.ranks:
                own = made
        while _ended:  # making a group is collective: all ranks are past what they did with earlier teams
            _ended.pop()._close()
        if self.number in chosen:
            if self._notices is None:  # a group's name is the same on its members, and no other's
                self._notices = PrefixStore(f"optpipe/{own.group_name}", _get_default_store())
            self._subgroups.append(Subgroup(self, chosen, own))
            if device.type == "cuda":
                self._subgroups[-1].meet(device)
        return self._subgroups[-1] if self.number in chosen else Subgroup(self, chosen, None)

    def end(self) -> None:
        """This rank needs no connection any more. Others may still be at their last step: they close when another team
        is made."""
        _ended.append(self)

    # Failure

    @contextmanager
    def together(self) -> Iterator[None]:
        """What all ranks do together. An `OptPipeError` in here is one that all raise; any other error ends the
        team."""
        if self.failure is not None:
            raise OptPipeError(f"this pipeline has failed, make a new one: {self.failure}")
        try:
            yield
        except LostError as lost:
            raise OptPipeError(self.fail(_sentence(lost), lost)) from lost
        except OptPipeError:
            raise
        except BaseException as error:
            self.fail(self.blame(error))
            raise

    @contextmanager
    def alone(self) -> Iterator[None]:
        """What this rank does by itself while the others do theirs: any error ends the team."""
        try:
            yield
        except LostError:
            raise
        except OptPipeError as error:
            self.fail(self.blame(error))
            raise

    def blame(self, error: BaseException) -> str:
        """Where this rank was, if that is known, and what happened."""
        return _sentence(error) if hasattr(error, "__notes__") else f"rank {self.number}: {_sentence(error)}"

    def fail(self, why: str, lost: LostError | None = None) -> str:
        """Ends the team: tells the others, and leaves none of them waiting. Returns what is told on all ranks: the
        first failure.

        `lost`: it is another rank that has failed, so which one is found out first, unless one of them says why.
        """
        if self.failure is None:
            self.failure = why
            try:
                self.failure = self._told(why) if lost is None else self._found_out(why, lost)
            except RuntimeError:  # torch's DistError: the store is where a rank was that is gone
                self.failure = why
            self._close()
        return self.failure

    def _told(self, why: str) -> str:
        """The first sentence that any rank told."""
        assert self._notices is not None
        return str(self._notices.compare_set("why", "", why), "utf-8")

    def _found_out(self, why: str, lost: LostError) -> str:
        """Whoever closes connections has told why before, or that it is still here: who has not is gone."""
        assert self._notices is not None
        self._notices.set(f"here/{self.number}", "")
        absent = self._absent(lost.absent)
        if not absent and not self._notices.check(["why"]):
            self._close()  # those who wait for this rank will hear, and say that they are here
            until = time.monotonic() + ROLL_CALL_S
            while (
                (absent := self._absent(range(self.size)))
                and time.monotonic() < until
                and not self._notices.check(["why"])
            ):
                time.sleep(0.02)
        gone = ", ".join(map(str, absent))
        return self._told(f"rank{'s' * (len(absent) > 1)} {gone} did not answer any more; {why}" if absent else why)

    def _absent(self, ranks: Iterable[int]) -> list[int]:
        assert self._notices is not None
        return [rank for rank in ranks if not self._notices.check([f"here/{rank}"])]

    def _close(self) -> None:
        for subgroup in self._subgroups:
            subgroup.close()


class Subgroup:
    """Some ranks of a team, numbered as in it, with connections of their own. Raises `LostError` where the other side
    is gone.

    Connections close when nothing holds torch's group or a work of it any more, tracebacks included, so only what is
    here does.
    """

    def __init__(self, team: Team, members: Sequence[int], group: dist.ProcessGroup | None) -> None:
        self._team, self._members, self._group = team, members, group
        self._transfers: WeakSet[Transfer] = WeakSet()

    def meet(self, device: torch.device) -> None:
        """Each two members exchange a byte, in an order that is the same for all. NCCL connects two ranks when they
        first meet, and there one's host waits for the other's: in a step that could be for ever. Not measured."""
        byte = torch.zeros(1, dtype=torch.uint8, device=device)
        for a, b in combinations(self._members, 2):
            if self._team.number == a:
                self.send(byte, b).wait()
            elif self._team.number == b:
                self.receive(byte, a).wait()

    def send(self, tensor: Tensor, to: int) -> Transfer:
        with self.reaching(to):
            return Transfer(self, dist.isend(tensor, self._team.ranks[to], group=self._open()), to)

    def receive(self, buffer: Tensor, source: int) -> Transfer:
        with self.reaching(source):
            return Transfer(self, dist.irecv(buffer, self._team.ranks[source], group=self._open()), source)

    def reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Transfer:
        """All-reduce, in place."""
        with self.reaching():
            return Transfer(self, dist.all_reduce(tensor, op, group=self._open(), async_op=True), None)

    def spread(self, tensor: Tensor, source: int) -> None:
        """The tensor of rank `source`, in place on all."""
        with self.reaching():
            dist.broadcast(tensor, self._team.ranks[source], group=self._open())

    def tell(self, value: Any, source: int) -> Any:
        """The value of rank `source`, on all."""
        box = [value if self._team.number == source else None]
        with self.reaching():
            dist.broadcast_object_list(box, self._team.ranks[source], group=self._open())
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every member's value."""
        values: list[Any] = [None] * len(self._members)
        with self.reaching():
            dist.all_gather_object(values, value, group=self._open())
        return values

    def close(self) -> None:
        group, self._group = self._group, None
        for transfer in self._transfers:
            transfer.forget()
        if group is not None and dist.is_initialized():
            with suppress(RuntimeError, ValueError):  # it has gone with its ranks, or the user has destroyed it
                if dist.get_backend(group) == "nccl":
                    group.abort()
                dist.destroy_process_group(group)

    def _open(self) -> dist.ProcessGroup:
        if self._group is None:
            raise LostError(self.why_closed)
        if not dist.is_initialized():
            raise OptPipeError(
                "torch.distributed has been shut down (destroy_process_group) before this pipeline: call close "
                "before it"
            )
        return self._group

    @property
    def why_closed(self) -> str:
        return self._team.failure or "the pipeline is closed"

    @contextmanager
    def reaching(self, other: int | None = None) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            text = str(error).rpartition("] ")[2] if "] " in str(error) else str(error)
            whom = "another rank" if other is None else f"rank {other}"
            told = f"rank {self._team.number} lost its connection to {whom}: {text.partition('. ')[0]}"
            raise LostError(told, self._closed() if other is None else [other]) from error.with_traceback(None)

    def _closed(self) -> list[int]:
        """The members that cannot be sent to, as far as gloo tells."""
        closed = []
        for member in self._members:
            try:
                if self._group is not None and dist.get_backend(self._group) == "gloo" and member != self._team.number:
                    dist.isend(torch.zeros(1), self._team.ranks[member], group=self._group)
            except RuntimeError:
                closed.append(member)
        return closed


class Transfer:
    """One message, or one reduction, under way."""

    def __init__(self, subgroup: Subgroup, work: Any, other: int | None) -> None:
        self._subgroup, self._work, self._other = subgroup, work, other
        subgroup._transfers.add(self)

    def wait(self) -> None:
        """Once; on CUDA only the stream waits."""
        if self._work is None:
            raise LostError(self._subgroup.why_closed)
        try:
            with self._subgroup.reaching(self._other):
                self._work.wait()
        finally:
            self.forget()

    def is_completed(self) -> bool:
        return self._work is None or bool(self._work.is_completed())

    def forget(self) -> None:
        self._work = None


def _teams(group: Any) -> list[list[int]]:
    """The ranks of every team: all that gave no group are one. What is wrong with a group on any rank is told on
    all."""
    told: list[Any] = [None] * dist.get_world_size()
    everyone = dist.new_group(backend="gloo")
    dist.all_gather_object(told, _members(group), group=everyone)
    dist.destroy_process_group(everyone)
    for complaint in told:
        if isinstance(complaint, str):
            raise InputError(f"group: {complaint}")
    teams = [list(team) for team in sorted({tuple(ranks) for ranks in told})]
    if (
        sorted(rank for team in teams for rank in team) != list(range(len(told)))
        or len({len(team) for team in teams}) > 1
    ):
        raise InputError(f"group: pipelines of ranks {teams}; every rank is in one of them, and all are equally long")
    return teams


def _members(group: Any) -> list[int] | str:
    """The ranks of a group, or why it is none."""
    if group is not None and group == dist.GroupMember.NON_GROUP_MEMBER:
        return f"rank {dist.get_rank()} is no member of it; every rank gives the group of its own pipeline"
    if group is not None and not isinstance(group, dist.ProcessGroup):
        return (
            f"rank {dist.get_rank()} gave a {type(group).__name__}: must be a torch.distributed.ProcessGroup, "
            "such as mesh.get_group()"
        )
    return dist.get_process_group_ranks(group)


def _sentence(error: BaseException) -> str:
    """Where it was, where that is known, and what it says."""
    what = str(error) if isinstance(error, OptPipeError) else f"{type(error).__name__}: {error}"
    return ": ".join([*getattr(error, "__notes__", [])[:1], what])
