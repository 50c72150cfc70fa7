"""What the ranks run in `test_torch_pipelining`: one training step by each of many schedules in PyTorch's own runtime,
`_PipelineScheduleRuntime`, which reads them from files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.distributed.tensor import DTensor

from support.ranks.cases import Gradients, batch, loss_fn
from support.ranks.systems import Outcome, model

Form = Literal["compute_only", "compute_comms"]


class Rows(NamedTuple):
    """A file of one row a rank, and the sizes of its schedule."""

    path: Path
    form: Form
    placement: tuple[int, ...]
    microbatches: int


def run_all(files: Sequence[Rows]) -> list[tuple[Outcome, str]]:
    """The outcome of each file, and the rows that torch has read, as it writes them."""
    return [step(file) for file in files]


def run_sharded(files: Sequence[Rows], pipelines: int) -> list[tuple[Outcome, str]]:
    """The same in several equal pipelines, which shard every stage among them (FSDP2) and get the same batch."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // pipelines, pipelines), mesh_dim_names=("pp", "dp"))
    return [step(file, mesh) for file in files]


def step(file: Rows, mesh: DeviceMesh | None = None) -> tuple[Outcome, str]:
    group = None if mesh is None else mesh.get_group("pp")
    rank, count = dist.get_rank(group), len(file.placement)
    modules = {s: module for s, module in enumerate(model(count)) if file.placement[s] == rank}
    if mesh is not None:
        for module in modules.values():
            fully_shard(module, mesh=mesh["dp"])
    stages = [PipelineStage(module, s, count, torch.device("cpu"), group=group) for s, module in modules.items()]
    runtime = _PipelineScheduleRuntime(stages, file.microbatches, loss_fn)
    runtime._load_csv(str(file.path), format=file.form)
    inputs, targets = batch(0, file.microbatches)
    losses: list[Tensor] = []
    runtime.step(*([inputs] if 0 in modules else []), target=targets if count - 1 in modules else None, losses=losses)
    written = file.path.with_suffix(f".{dist.get_rank()}")
    runtime._dump_csv(str(written), format=file.form)
    found = {j: loss.item() for j, loss in enumerate(losses)}
    return Outcome(found, _gradients(modules)), written.read_text()


def _gradients(modules: dict[int, nn.Module]) -> Gradients:
    return {
        f"{s}.{name}": (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).numpy().copy()
        for s, module in modules.items()
        for name, p in module.named_parameters()
        if p.grad is not None
    }
