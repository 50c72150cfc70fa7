"""`Grid`: the ranks of all pipelines, and which of them compute the same stages together.

Rank k of a pipeline and its inner peers, one rank of each of several pipelines, together compute the stages of rank k:
by tensor, context or expert parallelism, whose collectives run inside the stage's ops. Such pipelines must issue the
same ops in the same order, so they are one team, with one schedule. Messages between stages stay within each pipeline.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from optpipe.errors import InputError
from optpipe_runtime.torch_private.groups import timeouts

Pipelines = tuple[tuple[int, ...], ...]  # the ranks of each, by their numbers in the default group


class Grid(NamedTuple):
    """`teams` are those of all ranks: each the pipelines of a team, by inner peer. `team` is this rank's, in which its
    pipeline is that of number `peer`."""

    teams: tuple[Pipelines, ...]
    team: Pipelines
    peer: int


def find_grid(group: Any, inner: Any) -> Grid:
    """Collective over all ranks: all that give no group are one pipeline, and a rank that gives no `inner` has no
    peers. Raises `InputError` on all ranks if one gives what is invalid."""
    answers = gather_from_everyone((_members(group), _inner_ranks(inner)))
    for pipeline, peers in answers:
        if isinstance(pipeline, str):
            raise InputError(f"group: {pipeline}")
        if isinstance(peers, str):
            raise InputError(f"inner: {peers}")
    pipelines = sorted({pipeline for pipeline, _ in answers})
    members = sorted(rank for ranks in pipelines for rank in ranks)
    if members != list(range(len(answers))) or len({len(ranks) for ranks in pipelines}) > 1:
        raise InputError(
            f"group: the pipelines have ranks {[list(ranks) for ranks in pipelines]}; every rank must be in exactly "
            "one, and all must be equally large"
        )
    teams = [tuple(answers[peer][0] for peer in peers) for _, peers in answers]  # of each rank
    for rank, (pipeline, peers) in enumerate(answers):
        # Rank k of a pipeline has one peer in each pipeline of its team, rank k there, and all see the same team.
        team, number = teams[rank], pipeline.index(rank)
        in_one_pipeline_each = len(set(team)) == len(peers) == len(answers[0][1])
        if not in_one_pipeline_each or any(
            member[number] != peer or any(teams[other] != team for other in member)
            for member, peer in zip(team, peers, strict=True)
        ):
            raise InputError(
                f"inner: rank {rank} has peers {list(peers)}, in pipelines {sorted(map(list, set(team)))}: "
                "give `group` one rank of each stage and `inner` the ranks of one stage, as two dimensions of one "
                "DeviceMesh do"
            )
    rank = dist.get_rank()
    return Grid(tuple(sorted(set(teams))), teams[rank], teams[rank].index(answers[rank][0]))


def user_timeout() -> timedelta:
    """The one that the user gave to `init_process_group`. Groups of a mesh do not have it, but torch's default."""
    everyone = dist.group.WORLD
    assert everyone is not None
    return min(timeouts(everyone), default=default_pg_timeout)


def gather_from_everyone(value: Any) -> list[Any]:
    """Collective over all ranks: the value of each, before there is a pipeline."""
    values: list[Any] = [None] * dist.get_world_size()
    everyone = dist.new_group(backend="gloo", timeout=user_timeout())
    dist.all_gather_object(values, value, group=everyone)
    dist.destroy_process_group(everyone)
    return values


def _members(group: Any) -> tuple[int, ...] | str:
    """The ranks of a group, or what is wrong with it."""
    if group is not None and group == dist.GroupMember.NON_GROUP_MEMBER:
        return f"rank {dist.get_rank()} is no member of it; every rank gives the group of its own pipeline"
    if group is not None and not isinstance(group, dist.ProcessGroup):
        return (
            f"rank {dist.get_rank()} gave a {type(group).__name__}: must be a torch.distributed.ProcessGroup, "
            "such as mesh.get_group()"
        )
    return tuple(dist.get_process_group_ranks(group))


def _inner_ranks(inner: Any) -> tuple[int, ...] | str:
    rank = dist.get_rank()
    if inner is None:
        return (rank,)
    if inner != dist.GroupMember.NON_GROUP_MEMBER and not isinstance(inner, dist.ProcessGroup | DeviceMesh):
        return (
            f"rank {rank} gave a {type(inner).__name__}: must be a DeviceMesh or a torch.distributed.ProcessGroup, "
            'such as mesh["tensor"]'
        )
    ranks = ranks_of(inner)
    return ranks if rank in ranks else f"rank {rank} is no member of it; every rank gives that of its own stages"


def dimensions(tensor: DTensor) -> list[set[int]]:
    """For each dimension of the tensor's mesh, the ranks along it that this rank is one of."""
    mesh = tensor.device_mesh
    return [set(dist.get_process_group_ranks(mesh.get_group(dim))) for dim in range(mesh.ndim)]


def ranks_of(members: dist.ProcessGroup | DeviceMesh | Any) -> tuple[int, ...]:
    """The ranks of a process group or of a device mesh of any dimensions, by their numbers in the default group."""
    if isinstance(members, DeviceMesh):
        return tuple(members.mesh.flatten().tolist())
    return () if members == dist.GroupMember.NON_GROUP_MEMBER else tuple(dist.get_process_group_ranks(members))


# What a stage communicates with inside its ops


class CheckedStage(nn.Module):
    """A stage of which the caller knows with whom its ops communicate. Its parts may hold other groups, for what runs
    between two steps."""


def require_inner(s: int, module: nn.Module, inner: Collection[int], replicas: Collection[int] = ()) -> None:
    """Raises `InputError` if a stage's ops communicate with ranks that are not its inner peers: these may run another
    schedule. DTensors may also be spread over `replicas`, by `fully_shard`, which communicates between the steps."""
    for name, ranks in () if isinstance(module, CheckedStage) else _communicating(module):
        if not ranks <= set(inner) and not ranks <= set(replicas):
            allowed = f"of which inner has {sorted(inner)}" if len(inner) > 1 else "which all must run one schedule"
            raise InputError(
                f"stage {s}: {name} communicates inside an op with ranks {sorted(ranks)}, {allowed}: give the "
                "Pipeline, as inner, the DeviceMesh or process group of all ranks that compute this stage together"
            )


def _communicating(module: nn.Module) -> Iterator[tuple[str, set[int]]]:
    """By name: each dimension over which a tensor is spread, and each group or mesh that a module holds."""
    for tensors in (module.named_parameters(), module.named_buffers()):
        for name, tensor in tensors:
            if isinstance(tensor, DTensor):
                yield from ((name, ranks) for ranks in dimensions(tensor))
    for name, part in module.named_modules():
        held = [value for value in vars(part).values() for value in _values(value)]
        if isinstance(part, nn.SyncBatchNorm) and part.process_group is None:
            held.append(dist.group.WORLD)
        for group in held:
            if isinstance(group, dist.ProcessGroup | DeviceMesh) and len(ranks := set(ranks_of(group))) > 1:
                yield name or type(part).__name__, ranks


def _values(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, tuple | list) else [value]
