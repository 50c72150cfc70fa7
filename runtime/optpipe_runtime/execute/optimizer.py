"""An optimizer on the host (Chronos-Offload): G takes a stage's gradients there, U updates, P brings the new parameters
to the device.

The stage's parameters as the optimizer knows them, in float32 at least, and its state live in host memory; on the
device are parameters of the stage's own type, and gradients until G. U runs in a thread beside compute, one at a time
on a rank. A step ends when its updates have; P belongs to the next one, so between two steps the device may still have
the parameters of before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from optpipe.errors import InputError
from optpipe_runtime.measure.clock import Clock
from optpipe_runtime.memory.pool import Engine, HostMemory, Link, ThreadEngine, Ticket, copy_all
from optpipe_runtime.ranks.layout import Layout
from optpipe_runtime.ranks.team import Team

Factory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]

ALIGNED = 64  # bytes


class _Shared:
    """A parameter on the device, its `master` on the host, and the host's `slot` of the device's type, through which
    both ways go."""

    def __init__(self, name: str, parameter: nn.Parameter, slot: Tensor) -> None:
        self.name, self.parameter, self.slot = name, parameter, slot
        wide = torch.promote_types(parameter.dtype, torch.float32)
        self.master = nn.Parameter(parameter.detach().to("cpu", wide, copy=True))
        self.leaving: Tensor | None = None  # the gradient, until it is on the host
        self.seen = -1

    @property
    def touched(self) -> bool:
        """Whether somebody has changed it in place since `seen`; we do so by `data`, which does not count."""
        return self.parameter._version != self.seen

    def fill(self) -> None:
        self.slot.copy_(self.master.detach())
        self.seen = self.parameter._version

    @torch.no_grad()
    def follow(self) -> None:
        """Takes over what somebody has made of the parameter."""
        if self.touched:
            value = self.parameter.detach().cpu()
            if not torch.equal(value, self.slot.to(value.dtype)):
                self.master.copy_(value)
            self.fill()


class HostOptimizer:
    """Of one stage. `factory` is given the host's copies of the parameters that require a gradient, as by
    `named_parameters`, and returns their `optimizer`. U's run on the `desk`, one after the other. Raises `InputError`
    for what cannot be updated here."""

    def __init__(self, stage: int, module: nn.Module, factory: Factory, link: Link, desk: Engine) -> None:
        self._stage, self._module, self._factory, self._link, self._desk = stage, module, factory, link, desk
        self._shared = list(_share(stage, module))
        self.optimizer = factory([(shared.name, shared.master) for shared in self._shared])
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise InputError(
                f"host_optimizers[{stage}] returned a {type(self.optimizer).__name__}: must be a torch.optim.Optimizer"
            )
        self._out: Sequence[Ticket] = ()
        self._updating: Sequence[Ticket] = ()
        self._in: Sequence[Ticket] = ()
        self._behind = False  # whether the device has the parameters of before the last update
        for shared in self._shared:
            shared.fill()

    @property
    def parameters(self) -> frozenset[nn.Parameter]:
        """Those of the stage that are updated here."""
        return frozenset(shared.parameter for shared in self._shared)

    # Ops

    def gradients_out(self) -> Sequence[Ticket]:
        """G: the gradients leave; each parameter's `.grad` is None from here on."""
        for shared in self._shared:
            shared.leaving, shared.parameter.grad = shared.parameter.grad, None
            if shared.leaving is not None and shared.leaving.layout is not torch.strided:
                raise InputError(
                    f"stage {self._stage}: the gradient of {shared.name} is sparse; updates on the host take dense ones"
                )
        copies = [(shared.slot, shared.leaving) for shared in self._shared if shared.leaving is not None]
        self._out = [self._link.down.run(lambda: copy_all(copies))]
        return self._out

    def update(self) -> Sequence[Ticket]:
        """U: begins when the gradients are there."""
        self._desk.run(self._arrive)  # a job of its own, so that waiting is no part of U's time
        self._updating = [self._desk.run(self._update)]
        return self._updating

    def parameters_in(self) -> Sequence[Ticket]:
        """P: nothing where the device has them."""
        if self._behind:
            self._in, self._behind = self._copy_in(), False
        return self._in

    def wait_in(self) -> None:
        """Before the stage's F: what is computed from here on has the new parameters."""
        for ticket in self._in:
            ticket.wait()
        self._in = ()

    def wait_update(self) -> None:
        """At the end of a step the host waits; raises what went wrong in U."""
        for ticket in self._updating:
            ticket.wait()
        self._updating = ()

    def _arrive(self) -> None:
        """Waits on the host; on CUDA, for a copy's end, the thread of a desk must not hold up a stream."""
        for ticket in self._out:
            ticket.end.synchronize() if isinstance(ticket.end, torch.cuda.Event) else ticket.wait()

    def _update(self) -> None:
        for shared in self._shared:
            shared.master.grad = None if shared.leaving is None else shared.slot.to(shared.master.dtype)
            shared.leaving = None
        self.optimizer.step()
        self.optimizer.zero_grad()
        for shared in self._shared:
            shared.fill()
        self._behind = True

    def _copy_in(self) -> Sequence[Ticket]:
        copies = [(shared.parameter.data, shared.slot) for shared in self._shared]
        return [self._link.up.run(lambda: copy_all(copies))]

    # Between two steps

    def start_step(self) -> None:
        """What has been loaded into the module since the last step counts on the host, too."""
        self._require_untouched()
        for shared in self._shared:
            shared.follow()

    def synchronize(self) -> None:
        """Brings in the parameters of the last update, if they are not there yet."""
        self._require_untouched()
        self.parameters_in()
        self.wait_in()

    def state_dict(self) -> dict[str, Any]:
        """The host's parameters by name and the optimizer's state: the tensors in use, not copies."""
        return {
            "parameters": {shared.name: shared.master.detach() for shared in self._shared},
            "optimizer": self.optimizer.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave, and brings the parameters to the device."""
        if state.keys() != {"parameters", "optimizer"}:
            raise InputError(
                f"stage {self._stage}: what was saved is no state_dict of an optimizer on the host, it has "
                f"{list(state)[:5]}"
            )
        saved = state["parameters"]
        for shared in self._shared:
            if shared.name not in saved or saved[shared.name].shape != shared.master.shape:
                raise InputError(
                    f"stage {self._stage}: what was saved has no {shared.name} of shape {list(shared.master.shape)}"
                )
        self.optimizer.load_state_dict(state["optimizer"])
        for shared in self._shared:
            shared.master.copy_(saved[shared.name])
            shared.fill()
        self._behind = True
        self.synchronize()

    def close(self) -> None:
        """Ends the desk, which a rank's optimizers share."""
        self._desk.close()

    def _require_untouched(self) -> None:
        if self._behind and any(shared.touched for shared in self._shared):
            raise InputError(
                f"stage {self._stage}: parameters were changed while their update was waiting on the host; call "
                "the Pipeline's "
                "synchronize() before they are read, saved or changed"
            )

    # Profile

    def second(self) -> HostOptimizer:
        """Another optimizer of the same parameters, to `rehearse` with."""
        return HostOptimizer(self._stage, self._module, self._factory, self._link, self._desk)

    @torch.no_grad()
    def rehearse(self) -> dict[str, Sequence[Ticket]]:
        """P, G and U by the names of their times, when they are over. The device's parameters stay as they are,
        gradients are None."""
        for shared in self._shared:
            shared.slot.copy_(shared.parameter)
        inward = self._copy_in()
        for ticket in inward:
            ticket.wait()
        for shared in self._shared:
            shared.parameter.grad = torch.zeros_like(shared.parameter)
        found = {"parameters_in_ms": inward, "gradient_out_ms": self.gradients_out(), "update_ms": self.update()}
        self.wait_update()
        return found


def on_host(
    factories: Mapping[int, Factory],
    stages: Mapping[int, nn.Module],
    layout: Layout,
    team: Team,
    link: Link,
    device: torch.device,
) -> dict[int, HostOptimizer]:
    """The optimizers of this rank's stages."""
    for s in factories:
        if not 0 <= s < len(layout.placement):
            raise InputError(f"host_optimizers[{s}]: there are {len(layout.placement)} stages, numbered from 0")
    own = sorted(factories.keys() & stages.keys())
    for s in own:
        _require_complete(s, stages, team)
    if not own:
        return {}
    desk = _desk(device)
    return {s: HostOptimizer(s, stages[s], factories[s], link, desk) for s in own}


def _require_complete(s: int, stages: Mapping[int, nn.Module], team: Team) -> None:
    """At G, inside the step, the stage's gradients are complete: nobody adds to them later."""
    if isinstance(stages[s], DistributedDataParallel) or team.size < dist.get_world_size():
        raise InputError(
            f"host_optimizers[{s}]: this pipeline has replicas, and gradients are averaged over them after the "
            "step, when these have left "
            "for the host"
        )
    own = {parameter: name for name, parameter in stages[s].named_parameters()}
    for other, module in stages.items():
        shared = own.keys() & set(module.parameters()) if other != s else ()
        for parameter in shared:
            raise InputError(
                f"host_optimizers[{s}]: {own[parameter]} is in stage {other}, too, which adds to its gradient"
            )


def _desk(device: torch.device) -> Engine:
    """Where a rank's updates run: a thread, whose marks are the device's, so that they stand in a trace with the other
    ops."""
    if device.type != "cuda":
        return ThreadEngine()
    clock, stream = Clock(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # idle: an event on it is now

    def mark() -> Any:
        with torch.cuda.stream(stream):
            return clock.mark()

    return ThreadEngine(mark)


def _share(stage: int, module: nn.Module) -> Iterable[_Shared]:
    """The module's parameters with slots in one piece of host memory, page-locked on CUDA."""
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    if not trained:
        raise InputError(f"host_optimizers[{stage}]: no parameter of stage {stage} requires a gradient")
    for name, parameter in trained:
        if type(parameter) is not nn.Parameter:
            raise InputError(
                f"host_optimizers[{stage}]: {name} is a {type(parameter).__name__}; updates on the host take "
                "whole parameters"
            )
    sizes = [-(-parameter.nbytes // ALIGNED) * ALIGNED for _, parameter in trained]
    memory = HostMemory(-1, max(ALIGNED, sum(sizes)))
    memory.lock(trained[0][1].device)
    for (name, parameter), place in zip(trained, torch.split(memory.tensor()[: sum(sizes)], sizes), strict=True):
        yield _Shared(name, parameter, place[: parameter.nbytes].view(parameter.dtype).view(parameter.shape))
