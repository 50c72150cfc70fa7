"""What the ranks run in `test_training` with replicas: stages in DDP or FSDP."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline
from support.ranks.cases import LENGTH, WIDTH, WORDS, Gradients, batch, loss_fn, make_stages, own, plain_step


class Odd(nn.Module):
    """A stage with running means, and with a layer that it does not use."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.unused = nn.Sequential(*layers), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@cache
def mesh() -> DeviceMesh:
    """Two replicas of two ranks each: ranks 0 and 1, ranks 2 and 3."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "pipe"))


class Place(NamedTuple):
    """This rank where replicas of two ranks train, or one pipeline of all ranks."""

    group: dist.ProcessGroup | None  # of its pipeline
    replica: int
    number: int  # in the pipeline
    replicas: int

    def batch(self, step: int, microbatches: int) -> list[Tensor]:
        return [part.chunk(self.replicas)[self.replica] for part in batch(step, self.replicas * microbatches)]

    def stages(self, placement: Sequence[int], how: str, dropout: float = 0.0, **options: Any) -> dict[int, nn.Module]:
        """Those of this rank, of the same model on both replicas."""
        stages = own(make_stages(len(placement), dropout), placement, self.group)
        return {s: wrapped(module, how, **options) for s, module in stages.items()}


def place(alone: bool = False) -> Place:
    if alone:
        return Place(None, 0, dist.get_rank(), 1)
    group = mesh()["pipe"].get_group()
    return Place(group, dist.get_rank() // 2, dist.get_rank(group), 2)


def whole(tensor: Tensor) -> Any:
    """Collective where it is sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().numpy().copy()


def parameters(modules: dict[int, nn.Module]) -> Gradients:
    return {
        f"{s}.{name.removeprefix('module.')}": whole(p)
        for s, module in modules.items()
        for name, p in module.named_parameters()
    }


def gradients(modules: dict[int, nn.Module]) -> Gradients:
    named = (
        (s, name.removeprefix("module."), p) for s, module in modules.items() for name, p in module.named_parameters()
    )
    return {f"{s}.{name}": whole(p.grad) for s, name, p in named if p.grad is not None}


def wrapped(module: nn.Module, how: str, replicas: DeviceMesh | None = None, **options: Any) -> nn.Module:
    if how == "alone":
        return module
    replicas = replicas or mesh()["replica"]
    if how == "ddp":
        return DistributedDataParallel(module, process_group=replicas.get_group(), **options)
    for part in (*module.children(), module):
        (fully_shard if how == "fsdp" else replicate)(part, mesh=replicas, **options)
    return module


class Odds(NamedTuple):
    """What a rank saw of a profile, evaluations before, between and after two accumulated steps, and of clipping."""

    sizes: tuple[int, ...]
    losses: list[list[float] | None]
    gradients: Gradients
    norm: float
    clipped: Gradients
    means: list[float]  # of the norm, after the last step


def odd_stages() -> list[nn.Module]:
    """The head is the embedding's transpose, tied by whoever uses them."""
    torch.manual_seed(5)
    first = Odd(nn.Embedding(WORDS, WIDTH), nn.BatchNorm1d(LENGTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
    last = Odd(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False))
    return [first, last]


def tied(module: nn.Module, stage: int) -> nn.Parameter:
    weight = module.get_submodule("layers.0" if stage == 0 else "layers.2").weight
    assert isinstance(weight, nn.Parameter)
    return weight


def odds(schedule: Schedule, how: str, **options: Any) -> Odds:
    here, m = place(), schedule.problem.microbatches
    number, inner = here.number, odd_stages()[here.number]
    module = wrapped(inner, how, **options)
    data = [here.batch(step, m) for step in range(2)]
    with Pipeline({number: module}, [0, 1], loss_fn, m, group=here.group) as pipe:
        pipe.tie(tied(inner, number))
        problem = pipe.profile(*data[0], activation_budget_bytes=10**9, repeats=1)
        pipe.load(Schedule(problem, schedule.programs))
        losses = [pipe.evaluate(*data[0]).losses]
        for inputs, targets in data:
            pipe.step(inputs, targets)
            means = [float(mean) for mean in inner.get_submodule("layers.1").running_mean] if number == 0 else []  # type: ignore[union-attr]
            losses.append(pipe.evaluate(inputs, targets).losses)
        found, norm = gradients({number: module}), pipe.clip_grad_norm_(0.1)
        stage = problem.stages[number]
        sizes = (
            stage.activation_bytes,
            stage.saved_for_weight_bytes,
            stage.checkpoint_bytes or 0,
            stage.offload_bytes or 0,
        )
        return Odds(sizes, losses, found, norm, gradients({number: module}), means)


def plain_odds(microbatches: int) -> tuple[Gradients, float, Gradients]:
    """Gradients of two accumulated steps in one process, the norm, and the clipped gradients."""
    torch.set_num_threads(1)
    modules = odd_stages()
    tied(modules[1], 1).data = tied(modules[0], 0).data
    modules[1].get_submodule("layers.2").weight = tied(modules[0], 0)
    for step in range(2):
        plain_step(modules, *batch(step, microbatches), microbatches)
    found = gradients(dict(enumerate(modules)))
    norm = nn.utils.clip_grad_norm_(list(dict.fromkeys(p for module in modules for p in module.parameters())), 0.1)
    return found, norm.item(), gradients(dict(enumerate(modules)))
