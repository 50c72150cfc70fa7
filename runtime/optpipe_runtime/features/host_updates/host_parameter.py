"""`HostParameter`: a parameter on the device, and what an optimizer on the host has of it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from optpipe.errors import InputError
from optpipe_runtime.memory.host_memory import allocate
from optpipe_runtime.ranks.parts import local
from optpipe_runtime.torch_private.tensors import version

ALIGNED = 64  # bytes


class HostParameter:
    """A parameter on the device, its `master` copy on the host, and a host buffer `slot` of the device's type, through
    which both copies go."""

    def __init__(self, name: str, parameter: nn.Parameter, slot: Tensor) -> None:
        self.name, self.parameter, self.slot = name, parameter, slot
        wide = torch.promote_types(parameter.dtype, torch.float32)
        self.master = nn.Parameter(self.own.detach().to("cpu", wide, copy=True))
        self.master.part_of = parameter if isinstance(parameter, DTensor) else None  # type: ignore[attr-defined]
        marked = getattr(parameter, "tensor_model_parallel", False)  # as in `ranks.clipping`
        self.master.tensor_model_parallel = marked  # type: ignore[attr-defined]
        self.leaving: Tensor | None = None  # the gradient, until it is on the host
        self.seen = -1  # the version of the parameter at the last `fill`

    @property
    def own(self) -> Tensor:
        """What this rank has of the parameter: the whole, or its part."""
        return local(self.parameter)

    @property
    def touched(self) -> bool:
        """Whether something else has changed the parameter in place. The copies here go by `data`, which does not
        count."""
        return version(self.own) != self.seen

    def fill(self) -> None:
        self.slot.copy_(self.master.detach())
        self.seen = version(self.own)

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
