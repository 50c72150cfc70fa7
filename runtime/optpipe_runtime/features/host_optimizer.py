"""`HostOptimizer`: an optimizer on the host (Chronos-Offload). G copies a stage's gradients there, U updates, P copies
the new parameters to the device.

U runs in a thread beside compute, one at a time on a rank. A step ends when its updates have ended, unless they wait to
be clipped. P belongs to the next step, so between two steps the device may still have the parameters from before the
update. With replicas the gradients are those of all when G runs. Of a DTensor the host has this rank's part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from optpipe.errors import InputError
from optpipe_runtime.memory.engines import CopyEngine, Handle, copy_all
from optpipe_runtime.memory.host_memory import allocate
from optpipe_runtime.memory.link import Link
from optpipe_runtime.ranks.gradients import placed
from optpipe_runtime.torch_private.tensors import local, version

# Makes the optimizer of a stage from its parameters on the host, with their names.
Factory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


class HostOptimizer:
    """One stage's optimizer on the host. `optimizer` is what the factory returned, as for a scheduler."""

    def __init__(
        self,
        stage: int,
        named: Iterable[tuple[str, nn.Parameter]],
        factory: Factory,
        link: Link,
        updates: CopyEngine,
        clipped: bool = False,
    ) -> None:
        """`factory` gets the host's copies of those `named` parameters that require a gradient. U runs on `updates`,
        which the optimizers of a rank share; if `clipped` not before `apply`. Raises `InputError` if the stage cannot
        be updated here."""
        self._stage, self._factory, self._link, self._updates = stage, factory, link, updates
        self._clipped = clipped
        self._parameters = list(host_parameters(stage, named))
        self.optimizer = factory([(entry.name, entry.master) for entry in self._parameters])
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise InputError(
                f"host_optimizers[{stage}] returned a {type(self.optimizer).__name__}: must be a torch.optim.Optimizer"
            )
        self._out: Sequence[Handle] = ()
        self._updating: Sequence[Handle] = ()
        self._in: Sequence[Handle] = ()
        self._behind = False  # whether the device still has the parameters from before the last update
        self._clipping = False  # whether gradients are here that wait to be clipped
        for entry in self._parameters:
            entry.fill()

    @property
    def parameters(self) -> frozenset[nn.Parameter]:
        """The stage's parameters that are updated on the host."""
        return frozenset(entry.parameter for entry in self._parameters)

    # Ops

    def gradients_out(self) -> Sequence[Handle]:
        """G: copies the gradients to the host. Each parameter's `.grad` is None from here on."""
        for entry in self._parameters:
            entry.leaving = None if entry.parameter.grad is None else local(placed(entry.parameter))
            entry.parameter.grad = None
            if entry.leaving is not None and entry.leaving.layout is not torch.strided:
                raise InputError(
                    f"stage {self._stage}: the gradient of {entry.name} is sparse; updates on the host take dense ones"
                )
        copies = [(entry.slot, entry.leaving) for entry in self._parameters if entry.leaving is not None]
        self._out = [self._link.out.run(lambda: copy_all(copies))]
        return self._out

    def update(self) -> Sequence[Handle]:
        """U: updates when the gradients are there, or, with clipping, only takes them."""
        self._updates.run(self._wait_for_gradients)  # a job of its own, so that waiting is no part of U's time
        self._clipping = self._clipped
        self._updating = [self._updates.run(self._take)]
        return self._updating

    def gradients(self) -> dict[nn.Parameter, nn.Parameter]:
        """For clipping, after a step: the host's copies, which have the gradients, by the stage's parameters."""
        self.wait_update()
        return {entry.parameter: entry.master for entry in self._parameters}

    def apply(self) -> None:
        """Updates by the clipped gradients, beside whatever follows."""
        if self._clipping:
            self._clipping = False
            self._updating = [self._updates.run(self._apply)]

    def parameters_in(self) -> Sequence[Handle]:
        """P: copies the parameters to the device, unless it has them."""
        self.wait_update()
        if self._behind:
            self._in, self._behind = self._copy_in(), False
        return self._in

    def freshen(self) -> None:
        """Before the stage's F: what is computed from here on uses the new parameters."""
        self.parameters_in()
        for handle in self._in:
            handle.wait()
        self._in = ()

    def wait_update(self) -> None:
        """At the end of a step: the host waits. Raises what went wrong in U."""
        for handle in self._updating:
            handle.wait()
        self._updating = ()

    def _wait_for_gradients(self) -> None:
        """Waits on the host: on CUDA `wait` would hold up the compute stream instead."""
        for handle in self._out:
            if isinstance(handle.end, torch.cuda.Event):
                handle.end.synchronize()
            else:
                handle.wait()

    def _take(self) -> None:
        for entry in self._parameters:
            entry.master.grad = None if entry.leaving is None else entry.slot.to(entry.master.dtype, copy=True)
            entry.leaving = None
        if not self._clipped:
            self._apply()

    def _apply(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        for entry in self._parameters:
            entry.fill()
        self._behind = True

    def _copy_in(self) -> Sequence[Handle]:
        copies = [(entry.own.data, entry.slot) for entry in self._parameters]
        return [self._link.back.run(lambda: copy_all(copies))]

    # Between two steps

    def start_step(self) -> None:
        """Copies to the host what has been loaded into the module since the last step."""
        if self._clipping:
            raise InputError(
                f"stage {self._stage}: its gradients wait on the host to be clipped: with clip_host_updates, call the "
                "Pipeline's clip_grad_norm_ after every step"
            )
        self.wait_update()
        self._require_untouched()
        for entry in self._parameters:
            entry.take_over()

    def synchronize(self) -> None:
        """Copies the parameters of the last update to the device, if they are not there yet."""
        self.wait_update()
        self._require_untouched()
        self.freshen()

    def state_dict(self) -> dict[str, Any]:
        """The host's parameters by name, and the optimizer's state: the tensors in use, not copies."""
        return {
            "parameters": {entry.name: entry.master.detach() for entry in self._parameters},
            "optimizer": self.optimizer.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a `state_dict`, and copies the parameters to the device. Raises `InputError` if it does not fit."""
        if state.keys() != {"parameters", "optimizer"}:
            raise InputError(
                f"stage {self._stage}: what was saved is no state_dict of an optimizer on the host, it has "
                f"{list(state)[:5]}"
            )
        saved = state["parameters"]
        for entry in self._parameters:
            if entry.name not in saved or saved[entry.name].shape != entry.master.shape:
                raise InputError(
                    f"stage {self._stage}: what was saved has no {entry.name} of shape {list(entry.master.shape)}"
                )
        self.optimizer.load_state_dict(state["optimizer"])
        for entry in self._parameters:
            entry.master.copy_(saved[entry.name])
            entry.fill()
        self._behind = True
        self.synchronize()

    def close(self) -> None:
        """Ends the thread, which the optimizers of a rank share."""
        self._updates.close()

    def _require_untouched(self) -> None:
        if self._behind and any(entry.touched for entry in self._parameters):
            raise InputError(
                f"stage {self._stage}: parameters were changed while their update was waiting on the host; call the "
                "Pipeline's synchronize() before they are read, saved or changed"
            )

    # Profile

    def duplicate(self) -> HostOptimizer:
        """Another optimizer of the same parameters, to `try_ops` with."""
        named = [(entry.name, entry.parameter) for entry in self._parameters]
        return HostOptimizer(self._stage, named, self._factory, self._link, self._updates)

    @torch.no_grad()
    def try_ops(self) -> dict[str, Sequence[Handle]]:
        """Runs P, G and U and waits for them; returns their transfers by the names of their times. The parameters on
        the device stay as they are, and gradients are None afterwards."""
        for entry in self._parameters:
            entry.slot.copy_(entry.own)
        inward = self._copy_in()
        for handle in inward:
            handle.wait()
        for entry in self._parameters:
            entry.parameter.grad = torch.zeros_like(entry.parameter)
        transfers = {"parameters_in_ms": inward, "gradient_out_ms": self.gradients_out(), "update_ms": self.update()}
        self.wait_update()
        return transfers


ALIGNED = 64  # bytes


class HostParameter:
    """A parameter on the device, its `master` on the host, and a host `slot` of its type between them."""

    def __init__(self, name: str, parameter: nn.Parameter, slot: Tensor) -> None:
        self.name, self.parameter, self.slot = name, parameter, slot
        wide = torch.promote_types(parameter.dtype, torch.float32)
        self.master = nn.Parameter(self.own.detach().to("cpu", wide, copy=True))
        self.master.part_of = parameter if isinstance(parameter, DTensor) else None  # type: ignore[attr-defined]
        marked = getattr(parameter, "tensor_model_parallel", False)  # as in `ranks.clipping`
        self.master.tensor_model_parallel = marked  # type: ignore[attr-defined]
        self.leaving: Tensor | None = None  # the gradient, until it is on the host
        self._version = -1  # of the parameter at the last `fill`

    @property
    def own(self) -> Tensor:
        """What this rank has of the parameter: the whole, or its part."""
        return local(self.parameter)

    @property
    def touched(self) -> bool:
        """Whether something else has changed it in place. Copies here go by `data`, which does not count."""
        return version(self.own) != self._version

    def fill(self) -> None:
        self.slot.copy_(self.master.detach())
        self._version = version(self.own)

    @torch.no_grad()
    def take_over(self) -> None:
        """Copies a change of the parameter on the device to the host."""
        if self.touched:
            value = self.own.detach().cpu()
            if not torch.equal(value, self.slot.to(value.dtype)):
                self.master.copy_(value)
            self.fill()


def host_parameters(stage: int, named: Iterable[tuple[str, nn.Parameter]]) -> Iterable[HostParameter]:
    """The parameters, or this rank's shards of them, with slots in one piece of host memory, page-locked on CUDA."""
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    if not trained:
        raise InputError(f"host_optimizers[{stage}]: no parameter of stage {stage} requires a gradient")
    for name, parameter in trained:
        if type(parameter) not in (nn.Parameter, DTensor):
            raise InputError(
                f"host_optimizers[{stage}]: {name} is a {type(parameter).__name__}; updates on the host take plain "
                "parameters, and those of fully_shard"
            )
    sizes = [-(-local(parameter).nbytes // ALIGNED) * ALIGNED for _, parameter in trained]
    memory = allocate(max(ALIGNED, sum(sizes)), trained[0][1].device).tensor()
    for (name, parameter), place in zip(trained, torch.split(memory[: sum(sizes)], sizes), strict=True):
        part = local(parameter)
        yield HostParameter(name, parameter, place[: part.nbytes].view(part.dtype).view(part.shape))
