"""Stages under data parallelism: modules in `DistributedDataParallel` or `fully_shard` (FSDP2), the same stage on
several pipelines.

W adds weight gradients outside autograd, so the wrappers' hooks do not see when a gradient is complete. To a wrapper a
step therefore looks like gradient accumulation: all micro-batches without communication, then one reduction by the
wrapper itself, with its buckets, types and hooks.

    with replicas.gathering():
        replicas.gather(s)        before the first F of stage s: FSDP begins to gather its parameters, once
        replicas.wait(s)
        every F, B and W
        replicas.reduction(s)     behind the last W of stage s: DDP's reducer averages the gradients, FSDP reduces and
                                  scatters them and shards the parameters again

Replicas communicate twice for each stage, in an order that does not depend on the schedule (`lowering.gathers`,
`execute.reductions`). So replicas may run different schedules. Until a stage is reduced, its rank holds its whole
parameters and gradients; they are no activations.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from optpipe.errors import InputError, OptPipeError
from optpipe_runtime.ranks.grid import ranks_of
from optpipe_runtime.ranks.layout import Layout
from optpipe_runtime.ranks.parts import dimensions, local
from optpipe_runtime.ranks.team import Team

log = logging.getLogger("optpipe.runtime")


class Replicas:
    """This rank's stages that have copies on other pipelines.

    Attributes
    ----------
    modules
        The modules inside the wrappers, by stage.
    reduced
        The stages with a wrapper, in the order in which all replicas reduce them.
    sharing
        For each stage those here that have a parameter or a buffer of it, with itself.
    """

    def __init__(self, stages: Mapping[int, nn.Module], layout: Layout, team: Team) -> None:
        self._team = team
        self._order = [s for s in layout.in_order if s in stages]
        self.modules: dict[int, nn.Module] = {}
        self._copied: dict[int, _Copied] = {}
        self._sharded: dict[int, _Sharded] = {}
        for s, module in sorted(stages.items()):
            inner = module
            if isinstance(module, DistributedDataParallel):
                self._copied[s] = _Copied(s, module, team)
                inner = module.module
            if any(isinstance(part, DistributedDataParallel) for part in inner.modules()):
                raise InputError(
                    f"stage {s} has a DistributedDataParallel inside: wrap the stage as a whole, and outside of "
                    "torch.compile"
                )
            if any(isinstance(part, FSDPModule) for part in inner.modules()):
                self._sharded[s] = _Sharded(s, inner, team)
            self.modules[s] = inner
        self.reduced = sorted(self._copied.keys() | self._sharded.keys(), reverse=True)
        self._gathered: list[int] = []  # stages, in the context of `gathering`
        own = {s: {id(tensor) for tensor in (*m.parameters(), *m.buffers())} for s, m in self.modules.items()}
        self.sharing = {s: {s, *(other for other in own if own[s] & own[other])} for s in own}

    def ranks(self, s: int) -> set[int]:
        """The ranks over which a stage is `fully_shard`ed; none for other stages."""
        return set(self._sharded[s].ranks) if s in self._sharded else set()

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Collective over the replicas: in this context FSDP's parameters may be gathered. At its end all are sharded.
        So that all replicas communicate equally often, those that have not been gathered are, before its end.
        Gradients that are not reduced by then are dropped."""
        self._gathered.clear()
        try:
            yield
            self.gather_all()
        finally:
            for stage in self._sharded.values():
                stage.shard()

    def gather(self, s: int) -> None:
        """Begins to gather the parameters of a stage, once in a context of `gathering`. All replicas gather their
        stages in the same order."""
        if s in self._sharded and s not in self._gathered:
            self._gathered.append(s)
            with self.exchanging():
                self._sharded[s].gather()

    def wait(self, s: int) -> None:
        """Waits until the parameters of a stage are whole."""
        if s in self._sharded:
            with self.exchanging():
                self._sharded[s].wait()

    def gather_all(self) -> None:
        """Gathers the stages that have not been gathered, and waits for all."""
        for s in self._order:
            self.gather(s)
            self.wait(s)

    def shard(self, s: int) -> None:
        """After an evaluation's last use of a stage: shards its parameters again."""
        if s in self._sharded:
            self._sharded[s].shard()

    def parameter_bytes(self, s: int) -> int:
        """What the whole parameters of a stage take where they are gathered. It must have been gathered before."""
        return self._sharded[s].parameter_bytes if s in self._sharded else 0

    def gradient_bytes(self, s: int) -> int:
        """What their whole gradients take at most."""
        return self._sharded[s].gradient_bytes if s in self._sharded else 0

    def held_bytes(self) -> int:
        """What this rank holds now of gathered parameters and their whole gradients."""
        return sum(stage.held_bytes() for stage in self._sharded.values())

    def forget(self) -> None:
        """Drops what a step, or a part of one, has added to whole gradients of sharded parameters."""
        for stage in self._sharded.values():
            stage.forget()

    def end_reductions(self) -> None:
        """All that were started have ended: lets go of what they have read."""
        for stage in self._sharded.values():
            stage.end_reduction()

    def reduction(self, s: int) -> tuple[list[Tensor], Callable[[], None]]:
        """Takes leave of a stage of `reduced`, after its last W. Returns the gradients that its reduction reads, and
        the reduction, a collective over the replicas: by it `.grad` becomes the mean over them."""
        copied, sharded = self._copied.get(s), self._sharded.get(s)
        read = [parameter.grad for parameter in self.modules[s].parameters() if parameter.grad is not None]
        if sharded is not None:
            read += sharded.leave()

        def reduce() -> None:
            with torch.enable_grad():
                if copied is not None:
                    torch.autograd.backward(copied.complete())
                if sharded is not None:
                    sharded.reduce()

        return read, reduce

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Wraps communication with other replicas. An error in here ends this rank's pipeline."""
        with self._team.local():
            try:
                yield
            except RuntimeError as error:
                raise OptPipeError(f"another replica has failed, or the communication with it: {error}") from error


class _Copied:
    """A stage in DistributedDataParallel. The wrapper's own forward and backward run once a step, when all gradients
    are complete."""

    def __init__(self, s: int, wrapper: DistributedDataParallel, team: Team) -> None:
        _require_apart(
            s, "DistributedDataParallel", dist.get_process_group_ranks(wrapper.process_group), team, "process_group"
        )
        delayed = wrapper._delay_all_reduce_params
        for option, value in {"static_graph": wrapper.static_graph, "delay_all_reduce_named_params": delayed}.items():
            if value:
                raise InputError(
                    f"stage {s}: DistributedDataParallel with {option} counts on one backward a step: leave it out"
                )
        self._stage, self._wrapper = s, wrapper
        self._trained = {
            name: parameter for name, parameter in wrapper.module.named_parameters() if parameter.requires_grad
        }

    def complete(self) -> Tensor:
        """Runs DDP's forward. Its backward finds every gradient complete and starts the reducer."""
        wrapper = self._wrapper
        found = [parameter for parameter in self._trained.values() if parameter.grad is not None]
        if not found or (len(found) < len(self._trained) and not wrapper.find_unused_parameters):
            names = [name for name, parameter in self._trained.items() if parameter.grad is None]
            raise InputError(
                f"stage {self._stage}: {names[0]} and {len(names) - 1} other parameters got no gradient in this "
                "step: make its DistributedDataParallel with find_unused_parameters=True"
            )
        module, wrapper.module = wrapper.module, _Complete(wrapper.module, found)
        try:
            signal: Tensor = wrapper(found[0].new_empty(0))
        finally:
            wrapper.module = module
        return signal


class _Complete(nn.Module):
    """Stands in for a module whose gradients are already there. Its buffers are the module's own, so that DDP keeps
    them equal on all replicas."""

    def __init__(self, module: nn.Module, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self._module, self._found = module, parameters

    def forward(self, _: Tensor) -> Any:
        return _AddsNothing.apply(*self._found)  # type: ignore[no-untyped-call]


class _AddsNothing(torch.autograd.Function):
    """Makes a number from parameters. Its backward reaches each parameter and adds nothing to its gradient."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.count = len(parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return (None,) * ctx.count


class _Sharded:
    """A stage with `fully_shard`ed modules, which gather and reduce when they are told to, not in their own forwards
    and backwards."""

    def __init__(self, s: int, module: nn.Module, team: Team) -> None:
        self.ranks: set[int] = set()
        self._whole = False
        self._waiting: list[Any] = []  # gathers of the parts, under way
        self._reduced: list[Tensor] = []  # whole gradients that a reduction reads
        self._parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
        self._fsdp_groups = groups = [group for part in self._parts for group in _groups(part)]
        self._fsdp_parameters = [parameter for group in groups for parameter in group.fsdp_params]
        for mesh in (group.mesh_info.mesh for group in groups):
            _require_apart(s, "fully_shard", list(ranks_of(mesh)), team, "mesh")
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
        self._shards = any(
            place.is_shard() and ranks <= self.ranks
            for parameter in sharded.values()
            for place, ranks in zip(parameter.placements, dimensions(parameter), strict=True)
        )
        inside = {id(below) for part in self._parts for below in part.modules() if below is not part}
        self._roots = [part for part in self._parts if id(part) not in inside]

    def gather(self) -> None:
        self._whole = True
        self._set(reducing=False)
        self._waiting = [part.unshard(async_op=True) for part in self._parts]

    def wait(self) -> None:
        while self._waiting:
            self._waiting.pop(0).wait()

    @property
    def parameter_bytes(self) -> int:
        return sum(out.numel() * out.itemsize for p in self._fsdp_parameters for out in p.all_gather_outputs)

    @property
    def gradient_bytes(self) -> int:
        """FSDP adds a gradient of another type than the parameter's to what it has put aside."""
        trained = [p for p in self._fsdp_parameters if p.sharded_param.requires_grad]
        whole = [(p, local(p._unsharded_param)) for p in trained]
        return sum(own.nbytes + (own.numel() * p.reduce_dtype.itemsize if p.reduce_dtype else 0) for p, own in whole)

    def held_bytes(self) -> int:
        """By live storages. Its reduction may run meanwhile."""
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
        self._reduced = [gradient for parameter in self._fsdp_parameters for gradient in _whole_gradients(parameter)]
        return self._reduced

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
            if self._shards:
                root.set_reshard_after_forward(False)


def _whole_gradients(parameter: Any) -> list[Tensor]:
    """Of one of FSDP's parameters: what backwards have added up, and what FSDP has put aside in another type."""
    own = getattr(parameter, "_unsharded_param", None)  # missing until it is gathered
    aside = getattr(parameter, "unsharded_accumulated_grad", None)  # newer releases of torch put nothing aside
    found = (own.grad if own is not None else None, aside)
    return [gradient for gradient in found if gradient is not None]


def _groups(part: FSDPModule) -> list[Any]:
    """The module's parameter groups: several, or in older releases of torch one or none."""
    state = part._get_fsdp_state()
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    return [group for group in [state._fsdp_param_group] if group] if groups is None else groups


def _require_apart(s: int, wrapper: str, ranks: list[int], team: Team, option: str) -> None:
    """A wrapper must span ranks of different pipelines. Raises `InputError` if two of them are in this one."""
    here = sorted(set(ranks) & set(team.ranks))
    if len(here) > 1:
        raise InputError(
            f"stage {s}: its {wrapper} spans ranks {sorted(ranks)}, of which {here} are in the same pipeline: give it "
            f"the {option} of this stage's rank on every replica, and the Pipeline the group of its own ranks"
        )
