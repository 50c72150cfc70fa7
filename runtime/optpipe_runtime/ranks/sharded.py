"""`Sharded`: a stage with `fully_shard`ed modules (FSDP2), which gather and reduce when they are told to, not in their
own forwards and backwards."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from optpipe.errors import InputError
from optpipe_runtime.ranks.grid import ranks_of
from optpipe_runtime.ranks.parts import dimensions, local, placed
from optpipe_runtime.ranks.set_apart import set_apart
from optpipe_runtime.ranks.team import Team

log = logging.getLogger("optpipe.runtime")


class Sharded:
    """Of one stage. `ranks` are those over which it is sharded or copied; `shards` tells whether it is sharded."""

    def __init__(self, s: int, module: nn.Module, team: Team) -> None:
        self._stage, self._module = s, module
        self.ranks: set[int] = set()
        self._whole = False
        self._in_windows: set[int] | None = None  # the parameters with a gradient in a step's windows, by their places
        self._waiting: list[Any] = []  # gathers of the parts, under way
        self._reduced: list[Tensor] = []  # whole gradients that a reduction reads
        self._elements: Counter[Any] = Counter()  # of each parameter's largest whole gradient that was counted
        self._parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
        self._fsdp_groups = groups = [group for part in self._parts for group in _groups(part)]
        self._fsdp_parameters = [parameter for group in groups for parameter in group.fsdp_params]
        for mesh in (group.mesh_info.mesh for group in groups):
            require_apart(s, "fully_shard", list(ranks_of(mesh)), team, "mesh")
            self.ranks |= set(ranks_of(mesh))
        managed = {parameter.sharded_param for parameter in self._fsdp_parameters}
        sharded: dict[str, Any] = {name: p for name, p in module.named_parameters() if p in managed}
        for parameter in sharded.values():
            mesh = parameter.device_mesh
            if parameter.device.type != mesh.device_type:
                raise InputError(
                    f"stage {s}: fully_shard keeps parameters on {parameter.device.type} and gathers them on "
                    f"{mesh.device_type}: leave out offload_policy, a pipeline's parameters are where it computes"
                )
        if apart := [name for name, p in module.named_parameters() if p.requires_grad and name not in sharded]:
            log.warning(
                "stage %d: %s and %d others are in no fully_shard: no mean over the replicas",
                s,
                apart[0],
                len(apart) - 1,
            )
        # With `replicate` nothing is sharded.
        self.shards = any(
            place.is_shard() and ranks <= self.ranks
            for parameter in sharded.values()
            for place, ranks in zip(parameter.placements, dimensions(parameter), strict=True)
        )
        inside = {id(below) for part in self._parts for below in part.modules() if below is not part}
        self._roots = [part for part in self._parts if id(part) not in inside]

    def gather(self) -> None:
        self._whole, self._in_windows = True, None
        self._set(reducing=False)
        self._waiting = [part.unshard(async_op=True) for part in self._parts]

    def wait(self) -> None:
        while self._waiting:
            self._waiting.pop(0).wait()

    def parameters(self) -> list[nn.Parameter]:
        """Gathered or not: of sharded parameters the shards."""
        shards = {getattr(p, "_unsharded_param", None): p.sharded_param for p in self._fsdp_parameters}
        return [shards.get(parameter, parameter) for parameter in self._module.parameters()]

    @property
    def parameter_bytes(self) -> int:
        return sum(out.numel() * out.itemsize for p in self._fsdp_parameters for out in p.all_gather_outputs)

    @property
    def gradient_bytes(self) -> int:
        """Backwards may leave a gradient less spread over inner peers than its parameter is: that of an embedding whose
        rows are spread has all rows on each. So each counts as large as it was found to be, at least as its parameter.
        FSDP adds a gradient of another type than the parameter's to what it has put aside."""
        found = 0
        for parameter in self._fsdp_parameters:
            if parameter.sharded_param.requires_grad:
                own = local(parameter._unsharded_param)
                aside = parameter.reduce_dtype.itemsize if parameter.reduce_dtype else 0
                found += max(own.numel(), self._elements[parameter]) * (own.itemsize + aside)
        return found

    def held_bytes(self) -> int:
        """By live storages, and notes how large gradients are, for `gradient_bytes`. Its reduction may run
        meanwhile."""
        for parameter in self._fsdp_parameters:
            for gradient in _whole_gradients(parameter):
                elements = local(gradient).untyped_storage().nbytes() // gradient.itemsize
                self._elements[parameter] = max(self._elements[parameter], elements)
        storages = [local(tensor).untyped_storage() for tensor in (*self._held(), *self._reduced)]
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())

    def _held(self) -> Iterator[Tensor]:
        for group in self._fsdp_groups:
            if group._all_gather_result is not None:
                yield group._all_gather_result.all_gather_output
        for parameter in self._fsdp_parameters:
            yield from parameter.all_gather_outputs
            yield from _whole_gradients(parameter)

    def leave(self) -> list[Tensor]:
        """From here on the stage is left to `reduce`. Returns its whole gradients."""
        self._whole = False
        self._place()
        self._reduced = self._gradients()
        return self._reduced

    def set_apart(self) -> tuple[list[Tensor], Callable[[], None]]:
        self._place()
        self._reduced = self._gradients()
        with_gradient = {i for i, p in enumerate(self._fsdp_parameters) if _whole_gradients(p)}
        if self._in_windows not in (None, with_gradient):
            odd = min(with_gradient ^ self._in_windows)
            raise InputError(
                f"stage {self._stage}: {self._fsdp_parameters[odd]._param_fqn} gets a gradient in some micro-batches "
                "and none in others, so replicas could reduce different parameters: leave out whole_gradients"
            )
        self._in_windows = with_gradient
        return self._reduced, set_apart([root._get_fsdp_state() for root in self._roots], _state_groups)

    def extremes(self, number: int) -> tuple[int, int]:
        """The least and the greatest number that the ranks give over which the stage is sharded."""
        mesh = self._fsdp_groups[0].mesh_info.mesh
        both = torch.tensor([-number, number], device=mesh.device_type)
        for dimension in range(mesh.ndim):
            dist.all_reduce(both, dist.ReduceOp.MAX, group=mesh.get_group(dimension))
        minus_least, most = both.tolist()
        return -minus_least, most

    def _place(self) -> None:
        """Makes whole gradients such that FSDP reduces them: of one type in a group, where it has put aside those that
        came at B, and not yet those of the W behind it. And spreads them over inner peers as their parameters are:
        here, in the order of the program. FSDP would do it when it reduces, beside ops whose collectives with the
        peers come at any time."""
        for group in self._fsdp_groups:
            aside = [vars(parameter).get("unsharded_accumulated_grad") is not None for parameter in group.fsdp_params]
            for parameter, is_aside in zip(group.fsdp_params, aside, strict=True):
                if any(aside) and not is_aside:
                    parameter.to_accumulated_grad_if_needed()
        for parameter in self._fsdp_parameters:
            own = getattr(parameter, "_unsharded_param", None)
            if isinstance(own, DTensor) and own.grad is not None:
                own.grad = placed(own)
            aside = vars(parameter).get("unsharded_accumulated_grad")
            if isinstance(aside, DTensor) and isinstance(own, DTensor):
                parameter.unsharded_accumulated_grad = aside.redistribute(placements=own.placements)

    def _gradients(self) -> list[Tensor]:
        return [gradient for parameter in self._fsdp_parameters for gradient in _whole_gradients(parameter)]

    def reduce(self) -> None:
        self._set(reducing=True)
        for root in self._roots:
            # FSDP itself calls this when a backward has ended.
            root._get_fsdp_state()._root_post_backward_final_callback()

    def end_reduction(self) -> None:
        self._reduced = []

    def shard(self) -> None:
        """Shards the parameters again where nothing was reduced: after an evaluation, a profile or a failure. Needs no
        communication."""
        if not self._whole:
            return
        self._waiting.clear()
        self._reduced = []
        for group in self._fsdp_groups:
            group._all_gather_result = None  # of a gather that nobody waits for, after a failure
        self.forget()
        for part in self._parts:
            part.reshard()
        self._whole = False

    def forget(self) -> None:
        for parameter in self._fsdp_parameters:
            if hasattr(parameter, "_unsharded_param"):  # else it was never gathered
                parameter._unsharded_param.grad = None
            if "unsharded_accumulated_grad" in vars(parameter):  # newer releases of torch put nothing aside
                parameter.unsharded_accumulated_grad = None

    def _set(self, reducing: bool) -> None:
        for root in self._roots:
            root.set_is_last_backward(reducing)
            root.set_requires_gradient_sync(reducing)
            root.set_reshard_after_backward(reducing)
            if self.shards:
                root.set_reshard_after_forward(False)


def _whole_gradients(parameter: Any) -> list[Tensor]:
    """Of one of FSDP's parameters: what backwards have added up, and what FSDP has put aside in another type."""
    own = getattr(parameter, "_unsharded_param", None)  # missing until it is gathered
    aside = getattr(parameter, "unsharded_accumulated_grad", None)  # newer releases of torch put nothing aside
    found = (own.grad if own is not None else None, aside)
    return [gradient for gradient in found if gradient is not None]


def _groups(part: FSDPModule) -> list[Any]:
    return _state_groups(part._get_fsdp_state())


def _state_groups(state: Any) -> list[Any]:
    """The parameter groups of a module's state: several, or in older releases of torch one or none."""
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    return [group for group in [state._fsdp_param_group] if group] if groups is None else groups


def require_apart(s: int, wrapper: str, ranks: list[int], team: Team, option: str) -> None:
    """A wrapper must span ranks of different pipelines. Raises `InputError` if two of them are in this one."""
    here = sorted(set(ranks) & set(team.ranks))
    if len(here) > 1:
        raise InputError(
            f"stage {s}: its {wrapper} spans ranks {sorted(ranks)}, of which {here} are in the same pipeline: give it "
            f"the {option} of this stage's rank on every replica, and the Pipeline the group of its own ranks"
        )
