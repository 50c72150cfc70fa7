"""Stages that several ranks compute together, by torch's tensor parallelism, and the same model in one process."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline
from optpipe_runtime.stage.io import LossFn
from support.ranks import cases
from support.ranks.cases import WIDTH, WORDS, Gradients, Plain, batch, loss_fn, plain_training, problem
from support.ranks.programs import OFFLOADED, ONE_F_ONE_B
from support.ranks.replicas import gradients

HEADS = 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


def make_stages() -> list[nn.Module]:
    """The same model on every rank: embedding in the first stage, head in the last, a block in each."""
    torch.manual_seed(3)
    first, last = Block(), Block()
    return [
        nn.Sequential(nn.Embedding(WORDS, WIDTH), first),
        nn.Sequential(last, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)),
    ]


def parallel(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The stage by tensor and sequence parallelism. Between stages each rank has its part of the sequence."""
    whole, part = Replicate(), Shard(1)
    plan: dict[str, Any] = {}
    for name, layer in stage.named_children():
        if isinstance(layer, nn.Embedding):
            plan[name] = RowwiseParallel(input_layouts=whole, output_layouts=part)
        elif isinstance(layer, nn.LayerNorm):
            plan[name] = SequenceParallel()
        elif isinstance(layer, nn.Linear):
            plan[name] = ColwiseParallel(input_layouts=part, output_layouts=whole)
        else:
            plan |= {
                f"{name}.norm1": SequenceParallel(),
                f"{name}.attention": PrepareModuleInput(input_layouts=part, desired_input_layouts=whole),
                **{f"{name}.attention.{one}": ColwiseParallel() for one in "qkv"},
                f"{name}.attention.out": RowwiseParallel(output_layouts=part),
                f"{name}.norm2": SequenceParallel(),
                f"{name}.up": ColwiseParallel(input_layouts=part),
                f"{name}.down": RowwiseParallel(output_layouts=part),
            }
    return parallelize_module(stage, mesh, plan)


def part_bytes(stage: nn.Module) -> tuple[int, int]:
    """What one of two ranks has of a stage's parameters, and of their gradients as backwards leave them. The embedding
    of some rows leaves gradients of all."""
    found = {}
    for name, layer in stage.named_modules():
        for kind, parameter in layer.named_parameters(recurse=False):
            whole = isinstance(layer, nn.LayerNorm) or (kind == "bias" and name.endswith(("out", "down")))
            found[parameter] = parameter.nbytes if whole else parameter.nbytes // 2
    rows = [layer.weight.nbytes // 2 for layer in stage.modules() if isinstance(layer, nn.Embedding)]
    return sum(found.values()), sum(found.values()) + sum(rows)


@cache
def mesh() -> DeviceMesh:
    """Two stages of two ranks each: ranks 0 and 1, ranks 2 and 3."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "tensor"))


def two_stages(modules: dict[int, nn.Module], microbatches: int, loss: LossFn = loss_fn, **options: Any) -> Pipeline:
    groups = {"group": mesh()["pipe"].get_group(), "inner": mesh()["tensor"]}
    return Pipeline(modules, [0, 1], loss, microbatches, **groups, **options)


class Seen(NamedTuple):
    losses: list[float] | None
    gradients: Gradients
    norm: float
    host_peak_bytes: int
    excess: Any
    gathered: tuple[int | None, int] = (None, 0)  # the peak, and what is certified


def step_of(
    pipe: Pipeline, modules: dict[int, nn.Module], data: Sequence[Tensor], trace: bool = False
) -> tuple[Seen, int]:
    for module in modules.values():
        module.zero_grad()
    report = pipe.step(*data, trace=trace)
    found = gradients(modules)
    norm = pipe.clip_grad_norm_(0.1)
    gathered = report.gathered_peak_bytes, report.gathered_certified_bytes
    return Seen(report.losses, found, norm, report.host_peak_bytes, report.excess, gathered), report.version


def plain(microbatches: int, steps: int) -> list[Plain]:
    return plain_training(make_stages(), cases.batches(steps, microbatches), microbatches, max_norm=0.1)


class Trained(NamedTuple):
    problem: str
    steps: list[Seen]
    versions: list[int]
    schedule: str
    at_b: frozenset[str]


def trained(microbatches: int, programs: Sequence[Sequence[Sequence[str]]], better: int) -> Trained:
    """Profiles, takes a step with each of the programs on the same parameters, then trains until an offer of
    `programs[better]` is swapped in. The second inner peer loads and offers other schedules than the first one."""
    stage, peer, m = dist.get_rank() // 2, dist.get_rank() % 2, microbatches
    module = parallel(make_stages()[stage], mesh()["tensor"])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    steps, versions = [], []
    with two_stages({stage: module}, m) as pipe:
        measured = pipe.profile(*batch(0, m), activation_budget_bytes=10**9, repeats=1)
        schedules = [Schedule.parse(measured, program, method=f"schedule {k}") for k, program in enumerate(programs)]
        for k in range(len(schedules)):
            pipe.load(schedules[k - peer])
            steps.append(step_of(pipe, {stage: module}, batch(0, m))[0])
        if pipe.number == 0:
            pipe.offer(schedules[better - peer])
        for step in range(2000):  # until the swap: how many steps the preparation takes is not the test
            optimizer.step()
            seen, version = step_of(pipe, {stage: module}, batch(step + 1, m))
            steps.append(seen)
            versions.append(version)
            if version > len(schedules):
                break
        return Trained(measured.to_json(), steps, versions, pipe.schedule.method or "", pipe.at_b[stage])


class Marked(nn.Module):
    """Holds a process group, as modules of other libraries do."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.weight, self.group = nn.Parameter(torch.ones(4)), group

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def refused() -> list[str]:
    """What is told to who names the wrong ranks as inner peers, or none."""
    stage, peer = dist.get_rank() // 2, dist.get_rank() % 2
    pipe, tensor = mesh()["pipe"], mesh()["tensor"]
    group, limit = pipe.get_group(), 1000 if (stage, peer) == (1, 1) else None

    def attempt(module: nn.Module, group: Any, inner: Any, limit: int | None = None) -> None:
        with Pipeline({stage: module}, [0, 1], loss_fn, 4, limit, group=group, inner=inner) as pipeline:
            pipeline.load(Schedule.parse(problem((0, 1), 4), ONE_F_ONE_B))
            pipeline.step(*batch(0, 4))
            pipeline.load(Schedule.parse(problem((0, 1), 4), OFFLOADED))

    return cases.refusals(
        lambda: attempt(parallel(make_stages()[stage], tensor), group, None),
        lambda: attempt(Marked(tensor), group, None),
        lambda: attempt(nn.SyncBatchNorm(4), group, tensor),
        lambda: attempt(Marked(None), group, "tensor"),
        lambda: attempt(Marked(None), group, pipe),
        lambda: attempt(Marked(None), None, tensor),
        lambda: attempt(parallel(make_stages()[stage], tensor), group, tensor, limit),
    )


def tied(programs: Sequence[Sequence[str]]) -> tuple[Gradients, float, Gradients, float]:
    """A step of stages whose head is the embedding, and of the same model in one process: gradients, norms."""
    stage, m = dist.get_rank() // 2, 4
    modules, whole = make_stages(), make_stages()
    module = parallel(modules[stage], mesh()["tensor"])
    copy = module.get_submodule("0" if stage == 0 else "2").weight
    assert isinstance(copy, nn.Parameter)
    with two_stages({stage: module}, m) as pipe:
        pipe.tie(copy)
        pipe.load(Schedule.parse(problem((0, 1), m), programs))
        pipe.step(*batch(0, m))
        found = gradients({stage: module})
        norm = pipe.clip_grad_norm_(0.1)
    whole[1].get_submodule("2").weight = whole[0].get_submodule("0").weight
    cases.plain_step(whole, *batch(0, m), m)
    expected = gradients({stage: whole[stage]})
    every = dict.fromkeys(p for one in whole for p in one.parameters())
    return found, norm, expected, nn.utils.clip_grad_norm_(list(every), 0.1).item()


def of_two_dimensions(programs: Sequence[Sequence[str]]) -> Seen:
    """Two stages on four inner peers: tensor parallelism over one dimension, and the same over the other."""
    ranks, m = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pipe", "copy", "tensor")), 4
    modules = {s: parallel(module, ranks["tensor"]) for s, module in enumerate(make_stages())}
    with Pipeline(modules, [0, 0], loss_fn, m, group=ranks["pipe"].get_group(), inner=ranks["copy", "tensor"]) as pipe:
        pipe.load(Schedule.parse(problem((0, 0), m), programs))
        return step_of(pipe, modules, batch(0, m))[0]


def measured() -> tuple[list[int], frozenset[str], int]:
    """What a profile finds, and what does not wait for W, if the first peer has one more of 129 columns, and the second
    one a smaller budget: bytes of each stage's activation, of what an offload frees, and each device's budget."""
    stage, peer = dist.get_rank() // 2, dist.get_rank() % 2
    whole = nn.Sequential(nn.Linear(WIDTH, 129, bias=False), nn.GELU(), nn.Linear(129, WIDTH, bias=False))
    plan = {
        "0": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),  # so that GELU keeps a DTensor
        "2": RowwiseParallel(output_layouts=Shard(1)),
    }
    module = parallelize_module(whole, mesh()["tensor"], plan)
    given = torch.ones(2, 8, 8, WIDTH)
    with two_stages({stage: module}, 4, functional.mse_loss) as pipe:
        problem = pipe.profile(*given, activation_budget_bytes=10 ** (9 - peer), repeats=1)
        first, device = problem.stages[0], problem.devices[0]
        pipe.load(Schedule.parse(problem, OFFLOADED))
        excess = pipe.step(*given).excess
        assert excess is None, excess
        found = [first.activation_bytes, first.offload_bytes or 0, device.activation_budget_bytes]
        return found, pipe.at_b[stage], dist.get_rank()
