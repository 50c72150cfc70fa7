"""`Sharded`: a stage with `fully_shard`ed modules (FSDP2), which gather and reduce on demand, not in their
own forwards and backwards.

A step goes through these phases:

    gather, wait          parameters become whole, once for all micro-batches
    F, B, W               whole gradients add up
    take_window           may come several times: reduces what has added up, beside later ops
    leave, reduce         behind the last W: reduces the rest and shards the parameters again
    end_reduction         behind each reduction: lets go of what it has read

FSDP's own terms: a whole parameter is "unsharded", a whole gradient in the type of the reduction "accumulated".
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from optpipe.errors import InputError
from optpipe_runtime.ranks.gradients import placed
from optpipe_runtime.ranks.grid import dimensions, ranks_of
from optpipe_runtime.ranks.team import Team
from optpipe_runtime.torch_private import fsdp, tensors
from optpipe_runtime.torch_private.fsdp import ShardedParameter
from optpipe_runtime.torch_private.tensors import local

log = logging.getLogger("optpipe.runtime")


class Sharded:
    """One stage, sharded over its `ranks`, or by `replicate` only copied. Without `fully_shard` it has no ranks, and
    nothing of this does anything."""

    def __init__(self, stage: int, module: nn.Module, team: Team) -> None:
        """Raises `InputError` if its parameters are elsewhere than it computes, or its ranks in one pipeline."""
        self._stage, self._module = stage, module
        self._parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
        nested = {id(below) for part in self._parts for below in part.modules() if below is not part}
        self._outermost = [part for part in self._parts if id(part) not in nested]
        self._groups = [group for part in self._parts for group in fsdp.groups_of(part)]
        self._parameters = [parameter for group in self._groups for parameter in group.parameters]

        self.ranks: set[int] = set()
        for group in self._groups:
            members = ranks_of(group.mesh)
            require_apart(stage, "fully_shard", list(members), team, "mesh")
            self.ranks.update(members)
        shards: list[Any] = [parameter.shard for parameter in self._parameters]
        for shard in shards:
            if shard.device.type != (kind := shard.device_mesh.device_type):
                raise InputError(
                    f"stage {stage}: fully_shard keeps parameters on {shard.device.type} and gathers them on {kind}: "
                    "leave out offload_policy, a pipeline's parameters are where it computes"
                )
        others = [name for name, p in module.named_parameters() if p.requires_grad and p not in set(shards)]
        if others and self._parts:
            log.warning(
                "stage %d: %s and %d others are in no fully_shard: no mean over the replicas",
                stage,
                others[0],
                len(others) - 1,
            )
        self.is_sharded = any(
            placement.is_shard() and along <= self.ranks
            for shard in shards
            for placement, along in zip(shard.placements, dimensions(shard), strict=True)
        )

        self._is_whole = False
        self._gathers: list[Any] = []  # of the parts, under way
        self._read: list[Tensor] = []  # whole gradients that a reduction reads
        self._window: set[int] | None = None  # indices of the parameters with a gradient in this step's windows
        self._largest: Counter[ShardedParameter] = Counter()  # elements of the largest whole gradient that was counted

    # Parameters

    def gather(self) -> None:
        self._is_whole, self._window = True, None
        self._set_last_backward(False)
        self._gathers = [part.unshard(async_op=True) for part in self._parts]

    def wait(self) -> None:
        while self._gathers:
            self._gathers.pop(0).wait()

    def shard(self) -> None:
        """Shards again where nothing was reduced: after an evaluation, profile or failure. No communication."""
        if not self._is_whole:
            return
        self._gathers.clear()
        self._read = []
        for group in self._groups:
            group.forget_gather()
        self.forget()
        for part in self._parts:
            part.reshard()
        self._is_whole = False

    def parameters(self) -> list[nn.Parameter]:
        """Those of the stage as they are between steps, also while they are gathered: of sharded ones the shards."""
        shards = {parameter.whole: parameter.shard for parameter in self._parameters}
        return [shards.get(parameter, parameter) for parameter in self._module.parameters()]

    def shards(self) -> list[nn.Parameter]:
        return [parameter.shard for parameter in self._parameters]

    def unsharded(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Those of the stage's parameters that no FSDP shards."""
        sharded = {id(tensor) for parameter in self._parameters for tensor in (parameter.shard, parameter.whole)}
        return [parameter for parameter in parameters if id(parameter) not in sharded]

    # Bytes

    @property
    def parameter_bytes(self) -> int:
        return sum(buffer.numel() * buffer.itemsize for p in self._parameters for buffer in p.gather_buffers)

    @property
    def gradient_bytes(self) -> int:
        """What the whole gradients take at most.

        Backwards may leave a gradient less spread over inner peers than its parameter is: that of an embedding whose
        rows are spread has all rows on each. So each counts as large as it was found to be, at least as its parameter.
        What FSDP has put aside in another type than the parameter's is held beside the gradient that backwards add up.
        """
        total = 0
        for parameter in self._parameters:
            if parameter.shard.requires_grad and parameter.whole is not None:
                whole = local(parameter.whole)
                bytes_aside = parameter.reduce_dtype.itemsize if parameter.reduce_dtype else 0
                total += max(whole.numel(), self._largest[parameter]) * (whole.itemsize + bytes_aside)
        return total

    def held_bytes(self) -> int:
        """Live storages now; a reduction may run meanwhile. Notes sizes of gradients for `gradient_bytes`."""
        held = [*self._read, *(group.gathering for group in self._groups if group.gathering is not None)]
        for parameter in self._parameters:
            for gradient in parameter.gradients:
                elements = local(gradient).untyped_storage().nbytes() // gradient.itemsize
                self._largest[parameter] = max(self._largest[parameter], elements)
            held += [*parameter.gather_buffers, *parameter.gradients]
        storages = [local(tensor).untyped_storage() for tensor in held]
        return sum({tensors.storage_id(storage): storage.nbytes() for storage in storages}.values())

    # Gradients

    def whole_gradients(self) -> list[tuple[int, Tensor]]:
        """What backwards have added up, with the identity of its parameter."""
        return [(id(parameter.shard), gradient) for parameter in self._parameters for gradient in parameter.gradients]

    def leave(self) -> list[Tensor]:
        """Behind the last W: from here on the stage is left to `reduce`. Returns its whole gradients."""
        self._is_whole = False
        self._make_reducible()
        self._read = [gradient for _, gradient in self.whole_gradients()]
        return self._read

    def reduce(self) -> None:
        """Collective: the mean over the ranks becomes the gradient of the shards, and parameters are sharded again."""
        self._set_last_backward(True)
        for part in self._outermost:
            fsdp.end_backward(part)

    def take_window(self) -> tuple[list[Tensor], Callable[[], None]]:
        """Behind a backward or W that is not the last: takes the whole gradients away. Returns them, and a collective
        that reduces them and adds the result to the gradients of the shards."""
        self._make_reducible()
        self._read = [gradient for _, gradient in self.whole_gradients()]
        with_gradient = {i for i, parameter in enumerate(self._parameters) if parameter.gradients}
        if self._window not in (None, with_gradient):
            odd = min(with_gradient ^ self._window)
            raise InputError(
                f"stage {self._stage}: {self._parameters[odd].name} gets a gradient in some micro-batches "
                "and none in others, so replicas could reduce different parameters: leave out whole_gradients"
            )
        self._window = with_gradient
        return self._read, fsdp.set_apart(self._outermost)

    def end_reduction(self) -> None:
        """Lets go of the gradients that a reduction has read."""
        self._read = []

    def forget(self) -> None:
        for parameter in self._parameters:
            parameter.forget_gradients()

    def process_groups(self) -> list[dist.ProcessGroup]:
        """One for each dimension of the mesh: a reduction over one after the other is one over all `ranks`."""
        return [group.mesh.get_group(dim) for group in self._groups[:1] for dim in range(group.mesh.ndim)]

    def _make_reducible(self) -> None:
        """Gives whole gradients the types and placements in which FSDP reduces them.

        It reduces a group in one type. It has put aside, in the type of the reduction, the gradients that came in an
        autograd backward, but not those of a W, which come outside of one. And gradients are spread over inner peers as
        their parameters are: here, in the order of the program. FSDP would do it when it reduces, beside ops whose
        collectives with the peers come at any time.
        """
        for group in self._groups:
            if any(parameter.aside is not None for parameter in group.parameters):
                for parameter in group.parameters:
                    if parameter.aside is None:
                        parameter.put_aside()
        for parameter in self._parameters:
            whole: Any = parameter.whole
            if isinstance(whole, DTensor):
                if whole.grad is not None:
                    whole.grad = placed(whole)
                if isinstance(parameter.aside, DTensor):
                    parameter.aside = parameter.aside.redistribute(placements=whole.placements)

    def _set_last_backward(self, is_last: bool) -> None:
        """Tells FSDP whether the next end of a backward is the last of a step: only then does it reduce and shard."""
        for part in self._outermost:
            part.set_is_last_backward(is_last)
            part.set_requires_gradient_sync(is_last)
            part.set_reshard_after_backward(is_last)
            if self.is_sharded:
                part.set_reshard_after_forward(False)


def require_apart(stage: int, wrapper: str, ranks: list[int], team: Team, option: str) -> None:
    """A wrapper must span ranks of different pipelines. Raises `InputError` if two of them are in this one."""
    together = sorted(set(ranks) & set(team.ranks))
    if len(together) > 1:
        raise InputError(
            f"stage {stage}: its {wrapper} spans ranks {sorted(ranks)}, of which {together} are in the same pipeline: "
            f"give it the {option} of this stage's rank on every replica, and the Pipeline the group of its own ranks"
        )
