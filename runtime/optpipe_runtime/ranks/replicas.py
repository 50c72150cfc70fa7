"""Stages under data parallelism: modules in `DistributedDataParallel` or `fully_shard` (FSDP2), the same stage on
several pipelines.

W adds weight gradients outside autograd, so the wrappers' hooks do not see when a gradient is complete. To a wrapper a
step therefore looks like gradient accumulation: all micro-batches without communication, then one reduction by the
wrapper itself, with its buckets, types and hooks.

    with replicas.gathering():
        replicas.gather(s)        before the first F of stage s
        replicas.wait(s)
        every F, B and W
        replicas.reduction(s)     behind the last W of stage s

Replicas communicate twice for each stage, in an order that does not depend on the schedule (`lowering.prepare`,
`execute.gradients`). So they may run different schedules. Replicas that have agreed on theirs may reduce a sharded
stage several times (`execute.gradients`): `Sharded.take_window` takes part of its gradients away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from optpipe.errors import InputError, OptPipeError
from optpipe_runtime.ranks.layout import Layout
from optpipe_runtime.ranks.sharded import Sharded, require_apart
from optpipe_runtime.ranks.team import Team
from optpipe_runtime.torch_private.groups import delayed_parameters


class Copied:
    """A stage in `DistributedDataParallel`, which runs once a step, when all gradients are complete."""

    def __init__(self, s: int, wrapper: DistributedDataParallel, team: Team) -> None:
        require_apart(
            s, "DistributedDataParallel", dist.get_process_group_ranks(wrapper.process_group), team, "process_group"
        )
        delayed = delayed_parameters(wrapper)
        for option, value in {"static_graph": wrapper.static_graph, "delay_all_reduce_named_params": delayed}.items():
            if value:
                raise InputError(
                    f"stage {s}: DistributedDataParallel with {option} counts on one backward a step: leave it out"
                )
        self._stage, self._wrapper, self.group = s, wrapper, wrapper.process_group
        self._trained = {
            name: parameter for name, parameter in wrapper.module.named_parameters() if parameter.requires_grad
        }

    def complete(self) -> Tensor:
        """Runs DDP's forward. Its backward finds every gradient complete and starts the reducer."""
        wrapper = self._wrapper
        complete = [parameter for parameter in self._trained.values() if parameter.grad is not None]
        if not complete or (len(complete) < len(self._trained) and not wrapper.find_unused_parameters):
            names = [name for name, parameter in self._trained.items() if parameter.grad is None]
            raise InputError(
                f"stage {self._stage}: {names[0]} and {len(names) - 1} other parameters got no gradient in this "
                "step: make its DistributedDataParallel with find_unused_parameters=True"
            )
        module, wrapper.module = wrapper.module, _Complete(wrapper.module, complete)
        try:
            signal: Tensor = wrapper(complete[0].new_empty(0))
        finally:
            wrapper.module = module
        return signal


class _Complete(nn.Module):
    """Stands in for a module whose gradients are there, with the module's own buffers, so that DDP keeps them equal."""

    def __init__(self, module: nn.Module, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self._module, self._parameters_with_gradient = module, parameters

    def forward(self, _: Tensor) -> Any:
        return _AddsNothing.apply(*self._parameters_with_gradient)  # type: ignore[no-untyped-call]


class _AddsNothing(torch.autograd.Function):
    """Makes a number from parameters. Its backward reaches each parameter and adds nothing to its gradient."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.count = len(parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return (None,) * ctx.count


class Replicas:
    """This rank's stages that have copies on other pipelines. `modules` are those inside the wrappers, by stage, and
    `sharded` what `fully_shard` has made of them; `reduced` the stages with a wrapper, in the order in which all
    replicas reduce them; `sharing`, for each stage, those here that have a parameter or a buffer of it, with itself."""

    def __init__(self, stages: Mapping[int, nn.Module], layout: Layout, team: Team) -> None:
        self._team = team
        self._order = [s for s in layout.in_order if s in stages]
        self.modules: dict[int, nn.Module] = {}
        self._copied: dict[int, Copied] = {}
        self.sharded: dict[int, Sharded] = {}
        for s, module in sorted(stages.items()):
            inner = module
            if isinstance(module, DistributedDataParallel):
                self._copied[s] = Copied(s, module, team)
                inner = module.module
            if any(isinstance(part, DistributedDataParallel) for part in inner.modules()):
                raise InputError(
                    f"stage {s} has a DistributedDataParallel inside: wrap the stage as a whole, and outside of "
                    "torch.compile"
                )
            self.modules[s], self.sharded[s] = inner, Sharded(s, inner, team)
        self.reduced = sorted((s for s in stages if s in self._copied or self.sharded[s].ranks), reverse=True)
        self._gathered: list[int] = []  # stages, in the context of `gathering`
        tensors = {s: {id(tensor) for tensor in (*m.parameters(), *m.buffers())} for s, m in self.modules.items()}
        self.sharing = {s: {s, *(other for other in tensors if tensors[s] & tensors[other])} for s in tensors}

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
            for stage in self.sharded.values():
                stage.shard()

    def gather(self, s: int) -> None:
        """Begins to gather a stage, once in a context of `gathering`, on all replicas in the same order."""
        if self.sharded[s].ranks and s not in self._gathered:
            self._gathered.append(s)
            with self.exchanging():
                self.sharded[s].gather()

    def wait(self, s: int) -> None:
        if self.sharded[s].ranks:
            with self.exchanging():
                self.sharded[s].wait()

    def gather_all(self) -> None:
        """Gathers the stages that have not been gathered, and waits for all."""
        for s in self._order:
            self.gather(s)
            self.wait(s)

    def held_bytes(self) -> int:
        """What this rank holds now of gathered parameters and their whole gradients."""
        return sum(stage.held_bytes() for stage in self.sharded.values())

    def forget(self) -> None:
        """Drops what a step, or a part of one, has added to whole gradients of sharded parameters."""
        for stage in self.sharded.values():
            stage.forget()

    def agree(self, number: int) -> bool:
        """Collective over the replicas, as the first of a step: whether all give the same number, which is not 0. True
        where no stage is sharded."""
        for s, stage in self.sharded.items():
            if groups := stage.process_groups():
                kind = next(self.modules[s].parameters()).device.type
                extremes = torch.tensor([-number, number], device=kind)
                with self.exchanging():
                    for group in groups:
                        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
                    minus_least, most = extremes.tolist()
                return bool(-minus_least == most != 0)
        return True

    def total(self, s: int, number: float) -> tuple[float, int]:
        """Collective over the replicas of a stage: the sum of their numbers, and how many replicas there are."""
        groups = [self._copied[s].group] if s in self._copied else self.sharded[s].process_groups()
        if not groups:
            return number, 1
        kind = next(self.modules[s].parameters()).device.type
        both = torch.tensor([number, 1.0], dtype=torch.float64, device=kind)
        with self.exchanging():
            for group in groups:
                dist.all_reduce(both, group=group)
        return float(both[0]), int(both[1])

    def reduction(self, s: int) -> tuple[list[Tensor], Callable[[], None]]:
        """Takes leave of a stage of `reduced`, after its last W. Returns the gradients that its reduction reads, and
        the reduction, a collective over the replicas: by it `.grad` becomes the mean over them."""
        copied, sharded = self._copied.get(s), self.sharded[s]
        read = [parameter.grad for parameter in self.modules[s].parameters() if parameter.grad is not None]
        read += sharded.leave()

        def reduce() -> None:
            with torch.enable_grad():
                if copied is not None:
                    torch.autograd.backward(copied.complete())
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
