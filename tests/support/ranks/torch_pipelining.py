"""Steps in PyTorch's own pipelining on ranks: by rows that it reads from a file, by its own schedules, and by
`torch_schedule`; what they leave, and what is refused."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, _PipelineScheduleRuntime
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from examples import paced
from optpipe import Problem, Schedule
from optpipe.errors import InputError
from optpipe_runtime import Layout, Pipeline, name_ranges, torch_schedule
from optpipe_runtime.memory.activation import StorageRef, storage_key
from optpipe_runtime.memory.host_memory import PAGE
from support.ranks.cases import LENGTH, Gradients, batch, loss_fn, numbers, own
from support.ranks.replicas import gradients, wrapped
from support.ranks.systems import Outcome, model


class Rows(NamedTuple):
    """A file of one row a rank, and the sizes of its schedule."""

    path: Path
    form: str
    placement: tuple[int, ...]
    microbatches: int


CPU = torch.device("cpu")
# Torch 2.11 lets neighbouring stages on one rank meet by messages in the first step, which gloo does not send.
NEIGHBOURS_APART = torch.__version__.startswith("2.11.")
IN_A_V = pytest.mark.skipif(NEIGHBOURS_APART, reason="this torch has no neighbours on one rank")


def stages_of(modules: dict[int, nn.Module], count: int, group: Any = None) -> list[PipelineStage]:
    return [PipelineStage(module, s, count, CPU, group=group) for s, module in modules.items()]


def take_step(
    run: Callable[..., object], owned: Collection[int], count: int, data: Sequence[Tensor], **how: Any
) -> None:
    """A step of torch's, which takes inputs where the first stage is, and targets where the last is."""
    inputs, targets = data
    run(*([inputs] if 0 in owned else []), target=targets if count - 1 in owned else None, **how)


def run_all(files: Sequence[Rows], sharded: bool = False, blocks: bool = False) -> list[tuple[Outcome, str]]:
    """The outcome of each file, and the rows that torch has read, as it writes them. `sharded`: in two equal pipelines,
    which shard every stage among them (FSDP2), `blocks` on their own, too, and get the same batch."""
    return [step(file, two_pipelines() if sharded else None, blocks) for file in files]


def two_pipelines() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("pp", "dp"))


def step(file: Rows, mesh: DeviceMesh | None = None, blocks: bool = False) -> tuple[Outcome, str]:
    group = None if mesh is None else mesh.get_group("pp")
    count = len(file.placement)
    modules = own(model(count), file.placement, group)
    if mesh is not None:
        for module in modules.values():
            for part in (*(module.children() if blocks else ()), module):
                fully_shard(part, mesh=mesh["dp"])
    runtime = _PipelineScheduleRuntime(stages_of(modules, count, group), file.microbatches, loss_fn)
    runtime._load_csv(str(file.path), format=file.form)
    losses: list[Tensor] = []
    take_step(runtime.step, modules, count, batch(0, file.microbatches), losses=losses)
    written = file.path.with_suffix(f".{dist.get_rank()}")
    runtime._dump_csv(str(written), format=file.form)
    found = {j: loss.item() for j, loss in enumerate(losses)}
    return Outcome(found, gradients(modules)), written.read_text()


def most_buffers(files: Sequence[Rows]) -> list[int]:
    """For each file the most buffers of received messages that live at one time in a step (torch 2.15)."""
    from torch.distributed.pipelining import _recv_buffers

    allocate, found = _recv_buffers._RecvInfo.allocate_buffer, []
    for file in files:
        made: list[StorageRef] = []
        most = [0]

        def counted(info: Any, device: Any) -> Tensor:
            buffer: Tensor = allocate(info, device)
            made.append(StorageRef(buffer.untyped_storage()))  # noqa: B023
            most.append(sum(ref.alive for ref in made))  # noqa: B023
            return buffer

        with patch.object(_recv_buffers._RecvInfo, "allocate_buffer", counted):
            step(file)
        found.append(max(most))
    return found


def traced(file: Rows, steps: int) -> Path:
    """A trace of some steps of these rows by torch.profiler, beside the file; without the first step."""
    step(file)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            step(file)
    path = file.path.with_suffix(f".trace-{dist.get_rank()}.json")
    profiler.export_chrome_trace(str(path))
    return path


def traced_by(name: str, plan: str, path: Path, named: bool = False) -> Path:
    """A trace of some steps by a schedule of torch with this name, after the first: t a training step, e an
    evaluation."""
    rank, ranks, microbatches = dist.get_rank(), dist.get_world_size(), 4
    kind = schedules.get_schedule_class(name)
    mine = [rank] if issubclass(kind, PipelineScheduleSingle) else [rank, rank + ranks]
    count = ranks * len(mine)
    stages = stages_of({s: module for s, module in enumerate(model(count)) if s in mine}, count)
    schedule = kind(stages[0] if len(stages) == 1 else stages, microbatches, loss_fn)
    if named:
        name_ranges(*stages)
    data = batch(0, microbatches)
    take_step(schedule.step, mine, count, data)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for letter in plan:
            take_step(schedule.step if letter == "t" else schedule.eval, mine, count, data)
    path = path.with_suffix(f".{rank}.json")
    profiler.export_chrome_trace(str(path))
    return path


class Offloaded(NamedTuple):
    """The second step by `torch_schedule` on one rank."""

    outcome: Outcome
    peak_bytes: int
    certified_bytes: int
    activation_bytes: dict[int, int]
    saved_for_weight_bytes: dict[int, int]
    host_peak_bytes: int
    alive_bytes: int  # the most that a count of its own finds


def run_offloaded(schedules: Sequence[Schedule]) -> list[Offloaded]:
    return [_offloaded(schedule) for schedule in schedules]


def _offloaded(schedule: Schedule) -> Offloaded:
    layout = Layout.from_problem(schedule.problem)
    count, m = len(layout.placement), layout.microbatches
    modules = own(model(count), layout.placement)
    runtime = torch_schedule(schedule, stages_of(modules, count), loss_fn)
    for _ in range(2):  # in the second one gradients have their memory already
        for module in modules.values():
            module.zero_grad(set_to_none=False)
        losses: list[Tensor] = []
        with (alive := Alive()):
            take_step(runtime.step, modules, count, batch(0, m), losses=losses, return_outputs=False)
    runtime.close()
    return Offloaded(
        Outcome({j: loss.item() for j, loss in enumerate(losses)}, gradients(modules)),
        runtime.peak_bytes,
        runtime.certified_bytes,
        runtime.activation_bytes,
        runtime.saved_for_weight_bytes,
        runtime.host_peak_bytes,
        alive.most,
    )


def run_paced(schedule: Schedule, times: paced.Times, steps: int) -> list[float]:
    """By step, but the first, its time on this rank in ms. Stages and copies sleep as long as they are to take."""
    layout, rank = Layout.from_problem(schedule.problem), dist.get_rank()
    modules = {s: paced.SleepingStage(times) for s, place in enumerate(layout.placement) if place == rank}
    count = len(layout.placement)
    runtime = torch_schedule(schedule, stages_of(modules, count), paced.loss)
    link = runtime._link
    link.out = link.back = paced.PacedEngine(link.out, times.copy)
    batch = torch.zeros(layout.microbatches * paced.SHAPE[0], paced.SHAPE[1], requires_grad=True)
    found = []
    for _ in range(1 + steps):
        dist.barrier()
        began = time.perf_counter()
        take_step(runtime.step, modules, count, (batch, batch), losses=[], return_outputs=False)
        found.append((time.perf_counter() - began) * 1e3)
    runtime.close()
    return found[1:]


def run_ordered(schedules: Sequence[Schedule]) -> list[tuple[Outcome, Any]]:
    """The outcome of a step by each of them, and what the last stage returns; loaded one after the other."""
    layout, rank = Layout.from_problem(schedules[0].problem), dist.get_rank()
    count, m = len(layout.placement), layout.microbatches
    modules = own(model(count), layout.placement)
    runtime = torch_schedule(schedules[0], stages_of(modules, count), loss_fn)
    found = []
    for schedule in schedules:
        runtime.load(schedule)
        for module in modules.values():
            module.zero_grad()
        losses: list[Tensor] = []
        (inputs, targets), last = batch(0, m), layout.placement[-1] == rank
        given = [inputs] if layout.placement[0] == rank else []
        outputs = runtime.step(*given, target=targets if last else None, losses=losses)
        outcome = Outcome({j: loss.item() for j, loss in enumerate(losses)}, numbers(modules))
        found.append((outcome, outputs.detach().numpy() if last else None))
    runtime.close()
    return found


def loads(first: Schedule, second: Sequence[Schedule]) -> str:
    """What `load` says to a second schedule, which is one of these by rank."""
    layout = Layout.from_problem(first.problem)
    runtime = torch_schedule(first, stages_of(own(model(2), layout.placement), 2), loss_fn)
    try:
        runtime.load(second[dist.get_rank()])
    except InputError as error:
        return str(error)
    finally:
        runtime.close()
    return ""


def run_documents(schedules: Sequence[Schedule], times: paced.Times, lengths: Tensor, steps: int) -> list[list[float]]:
    """For each schedule its steps' times on this rank, in ms: stages sleep as long as the micro-batches' documents
    take."""
    layout, rank = Layout.from_problem(schedules[0].problem), dist.get_rank()
    modules = {s: paced.SleepingStage(times) for s, place in enumerate(layout.placement) if place == rank}
    count = len(layout.placement)
    runtime = torch_schedule(schedules[0], stages_of(modules, count), paced.loss)
    data = torch.zeros(layout.microbatches * paced.SHAPE[0], paced.SHAPE[1], requires_grad=True)
    found: list[list[float]] = [[] for _ in schedules]
    for n in range(1 + steps * len(schedules)):
        runtime.load(schedules[n % len(schedules)])
        dist.barrier()
        began = time.perf_counter()
        take_step(runtime.step, modules, count, (data, data), lengths=lengths, losses=[], return_outputs=False)
        if n:
            found[n % len(schedules)].append((time.perf_counter() - began) * 1e3)
    runtime.close()
    return found


def in_replicas(schedule: Schedule) -> dict[str, Any]:
    """Gradients of one step by `torch_schedule`, with stages in DDP and other data in each of two pipelines."""
    mesh, layout = two_pipelines(), Layout.from_problem(schedule.problem)
    count, m, group = len(layout.placement), layout.microbatches, mesh.get_group("pp")
    modules = own(model(count), layout.placement, group)
    in_ddp = {s: wrapped(module, "ddp", mesh["dp"]) for s, module in modules.items()}
    runtime = torch_schedule(schedule, stages_of(in_ddp, count, group), loss_fn)
    take_step(runtime.step, modules, count, batch(mesh["dp"].get_local_rank(), m), losses=[])
    runtime.close()
    return gradients(modules)


class Trained(NamedTuple):
    """What some steps and evaluations have left on a rank."""

    losses: list[list[float]]  # of each of them; none without the last stage
    gradients: Gradients
    buffers: dict[str, Any]
    forwards: int  # of a stage, beside those of micro-batches


def with_batch_norm(stages: int) -> list[nn.Module]:
    return [nn.Sequential(module, nn.BatchNorm1d(LENGTH).double()) for module in model(stages)]


def buffers(modules: dict[int, nn.Module]) -> dict[str, Any]:
    return {f"{s}.{name}": b.numpy() for s, module in modules.items() for name, b in module.named_buffers()}


def trained(schedule: Schedule, plan: str, **options: Any) -> Trained:
    """By the plan's letters, on a batch of its own each: t a step, e an evaluation. Gradients are never set to zero."""
    layout = Layout.from_problem(schedule.problem)
    count, m = len(layout.placement), layout.microbatches
    modules, forwards = own(with_batch_norm(count), layout.placement), []
    for module in modules.values():
        module.register_forward_pre_hook(lambda module, _: forwards.append(module))
    runtime = torch_schedule(schedule, stages_of(modules, count), loss_fn, **options)
    found = []
    for n, letter in enumerate(plan):
        for module in modules.values():
            module.train(letter == "t")
        losses: list[Tensor] = []
        with torch.set_grad_enabled(letter == "t"):
            take_step(runtime.step if letter == "t" else runtime.eval, modules, count, batch(n, m), losses=losses)
        found.append([loss.item() for loss in losses])
    runtime.close()
    beside = max(Counter(forwards).values()) - m * len(plan)
    return Trained(found, numbers(modules), buffers(modules), beside)


def profiled_for_torch(placement: Sequence[int], microbatches: int) -> Problem:
    """By `Pipeline.profile`, of the stages that `run_offloaded` trains."""
    with Pipeline(own(model(len(placement)), placement), placement, loss_fn, microbatches) as pipe:
        return pipe.profile(*batch(0, microbatches), activation_budget_bytes=10**9, repeats=1, stack="torch")


def alone() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("pp", "dp"))["dp"]


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "": lambda module: module,
    "ddp": lambda module: nn.Sequential(wrapped(module, "ddp", alone())),
    "fsdp": lambda module: nn.Sequential(fully_shard(module, mesh=alone())),
    "compiled": lambda module: nn.Sequential(module.compile() or module),
}


def refusal(schedule: Schedule, placement: Sequence[int], rows: int = 0, wrapper: str = "", **options: Any) -> str:
    """What `torch_schedule` says to stages that are elsewhere than the schedule's, wrapped, or in a step with so many
    rows, and to options."""
    count = len(placement)
    mine = {s: WRAPPERS[wrapper](module) for s, module in own(model(count), placement).items()}
    try:
        runtime = torch_schedule(schedule, stages_of(mine, count), loss_fn, **options)
        take_step(runtime.step, mine, count, [part[:rows] for part in batch(0, rows)])
    except InputError as error:
        return str(error)
    return ""


def refusal_of_one(schedule: Schedule, changed: str, **options: Any) -> str:
    """What is said, until the first step has ended, to a pipeline of this rank alone whose first stage is `frozen`, or
    whose head and embedding are `tied`."""
    count = len(schedule.problem.stages)
    modules = dict(enumerate(model(count)))
    if changed == "frozen":
        modules[0].requires_grad_(False)
    else:
        modules[count - 1][-1].weight = modules[0][0].weight
    try:
        runtime = torch_schedule(schedule, stages_of(modules, count, alone().get_group()), loss_fn, **options)
        take_step(runtime.step, modules, count, batch(0, schedule.problem.microbatches))
    except InputError as error:
        return str(error)
    return ""


class Alive(TorchDispatchMode):
    """Counts the bytes of all storages that were made in it and still live, after every operation; without the pages of
    the host pool, which are larger than any tensor here."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, StorageRef] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage_key(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                ref = StorageRef(tensor.untyped_storage())
                if ref.nbytes < PAGE["cpu"] and ref.key not in given:  # what ops change in place was there before
                    self._made[ref.key] = ref
        self._made = {key: ref for key, ref in self._made.items() if ref.alive}
        self.most = max(self.most, sum(ref.nbytes for ref in self._made.values()))
        return result
