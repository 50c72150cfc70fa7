"""Replicas of pipelines on ranks: stages in DDP or FSDP, trainings, and what happens in which order."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline
from optpipe_runtime.execute.gradients import Reductions
from optpipe_runtime.features.host_optimizer import HostOptimizer
from optpipe_runtime.ranks.replicas import Replicas
from optpipe_runtime.ranks.sharded import Sharded
from optpipe_runtime.stage.runner import StageRunner
from support.ranks.cases import (
    LENGTH,
    WIDTH,
    WORDS,
    Gradients,
    batch,
    batches,
    loss_fn,
    make_stages,
    own,
    plain_step,
    plain_training,
    sgd,
)
from support.ranks.swaps import failing


class Odd(nn.Module):
    """A stage with running means, and with a layer that it does not use."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.unused = nn.Sequential(*layers), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def whole_bytes(s: int, stages: int = 4) -> int:
    """Of all parameters of a stage."""
    return sum(parameter.nbytes for parameter in make_stages(stages)[s].parameters())


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


# Trainings, and their events

PATIENCE_S = 120.0
MIXED = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}  # parameters are gathered in bfloat16


class Turn(NamedTuple):
    """One step. `load`: which schedule, by its place. `memory`: the first rank runs out of memory in it. `length`: of
    the first replica's sequences. `awaits`: ops of the first replica, and for which event each waits."""

    load: int | None = None
    memory: bool = False
    length: int = LENGTH
    awaits: Sequence[tuple[str, str]] = ()


class Ran(NamedTuple):
    """On one rank. `events`: of each step, in their order: ops as they begin, "gathers" as a stage begins to be
    gathered, "starts" and "ended" of its reduction or of a window, "out" as its gradients go to the host. `held`: of
    each step, the bytes of gathered parameters and their gradients as ops begin. `gathered`: their peak and what is
    certified."""

    events: list[list[str]]
    losses: list[list[float] | None]
    gradients: list[Gradients]
    norms: list[float]
    parameters: Gradients
    versions: list[int]
    held: list[dict[str, int]]
    gathered: list[tuple[int | None, int]]

    def reduced(self, step: int) -> list[int]:
        """The stages in the order in which their reductions start."""
        return [int(event.split()[1]) for event in self.events[step] if event.startswith("starts")]


class Events:
    def __init__(self) -> None:
        self.seen: list[str] = []
        self.held: dict[str, int] = {}
        self._happened: defaultdict[str, threading.Event] = defaultdict(threading.Event)

    def tell(self, event: str) -> None:
        self.seen.append(event)
        self._happened[event].set()

    def wait(self, event: str) -> None:
        assert self._happened[event].wait(PATIENCE_S), f"{event}: did not come behind {self.seen[-1]}"


def trained(
    schedules: Sequence[Sequence[Schedule]],
    turns: Sequence[Turn],
    how: str,
    late: bool = False,
    max_norm: float = 0.0,
    tied: bool = False,
    shared: bool = False,
    trace: bool = False,
    profiles: bool = False,
    whole_gradients: int | None = None,
    hosted: Sequence[int] = (),
    factory: Any = None,
    **wrapping: Any,
) -> Ran:
    """Each replica trains by its own schedules. `late`: gradients are reduced when the step has ended. `tied`: a layer
    of the first stage is tied to that of the second. `shared`: the head's weight is the embedding's. `hosted`: stages
    whose optimizer, by the factory, is on the host."""
    here, problem = place(alone=how == "alone"), schedules[0][0].problem
    number, replica, m = here.number, here.replica, problem.microbatches
    placement = [stage.device for stage in problem.stages]
    bare = own(make_stages(len(placement)), placement, here.group)
    if shared and number == 0:
        bare[3].get_submodule("2").weight = bare[0].get_submodule("0").weight
    modules = {s: wrapped(module, how, **wrapping) for s, module in bare.items()}
    on_device = [module for s, module in modules.items() if s not in hosted]
    optimizer = (
        factory([torch.zeros(0), *(p for module in on_device for p in module.parameters())])
        if factory
        else sgd(*on_device)
    )
    options = {"whole_gradients": whole_gradients, "host_optimizers": dict.fromkeys(hosted, factory)}
    options |= {"clip_host_updates": max_norm > 0, "group": here.group}
    ran = Ran([], [], [], [], {}, [], [], [])
    with Pipeline(modules, placement, loss_fn, m, **options) as pipe:
        if profiles:
            pipe.profile(*here.batch(0, m), activation_budget_bytes=10**9, repeats=1)
            pipe.problem = problem
        if tied:
            pipe.tie(_norm(bare[number]))
        for step, turn in enumerate(turns):
            if turn.load is not None:
                pipe.load(schedules[replica][turn.load])
            optimizer.zero_grad()
            data = here.batch(step, m)
            if replica == 0:
                data = [part[:, : turn.length].contiguous() for part in data]
            events = Events()
            with ExitStack() as around:
                around.enter_context(recorded(pipe, events, turn.awaits if replica == 0 and not late else ()))
                if late:  # no reduction starts within a step
                    around.enter_context(mock.patch.object(Reductions, "complete", return_value=None))
                if turn.memory and dist.get_rank() == 0:
                    around.enter_context(failing("backward", 2, torch.OutOfMemoryError("too much")))
                report = pipe.step(*data, trace=trace)
            ran.events.append(events.seen)
            ran.losses.append(report.losses)
            ran.versions.append(report.version)
            ran.held.append(events.held)
            ran.gathered.append((report.gathered_peak_bytes, report.gathered_certified_bytes))
            if max_norm:
                ran.norms.append(pipe.clip_grad_norm_(max_norm))
            ran.gradients.append(gradients(modules))
            optimizer.step()
        pipe.synchronize()
    return ran._replace(parameters=parameters(modules))


def _norm(stage: nn.Module) -> nn.Module:
    return next(module for module in stage.modules() if isinstance(module, nn.LayerNorm))


@contextmanager
def recorded(pipe: Pipeline, events: Events, awaits: Sequence[tuple[str, str]]) -> Iterator[None]:
    """Tells the events of a step, of which some ops wait for others."""
    replicas = pipe.runner.rank.replicas

    def op(kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def run(stage: StageRunner, j: int, *arguments: Any, **options: Any) -> Any:
            name = f"{stage.index}{kind}{j}"
            for event in (event for awaiting, event in awaits if awaiting == name):
                events.wait(event)
            events.held[name] = replicas.held_bytes()
            events.tell(name)
            return real(stage, j, *arguments, **options)

        return run

    def recording(s: int, read: Any, reduce: Callable[[], None]) -> Any:
        def run() -> None:
            events.tell(f"starts {s}")
            reduce()
            events.tell(f"ended {s}")

        return read, run

    def gather(s: int) -> None:
        if s not in replicas._gathered:
            events.tell(f"gathers {s}")
        Replicas.gather(replicas, s)

    def out(s: int) -> Callable[[], Any]:
        def run() -> Any:
            events.tell(f"out {s}")
            return HostOptimizer.gradients_out(pipe.host_optimizers[s])

        return run

    ops = {"F": "forward", "B": "backward", "W": "weight"}
    take_window = Sharded.take_window
    with (
        ExitStack() as hosts,
        mock.patch.multiple(
            replicas, gather=gather, reduction=lambda s: recording(s, *Replicas.reduction(replicas, s))
        ),
        mock.patch.object(Sharded, "take_window", lambda own: recording(own._stage, *take_window(own))),
        mock.patch.multiple(StageRunner, **{name: op(kind, getattr(StageRunner, name)) for kind, name in ops.items()}),
    ):
        for s, host in pipe.host_optimizers.items():
            hosts.enter_context(mock.patch.object(host, "gradients_out", out(s)))
        yield


def plain_shared(microbatches: int, steps: int) -> list[Gradients]:
    """In one process, with the head's weight that is the embedding's: gradients of each step."""
    modules = make_stages(4)
    modules[3].get_submodule("2").weight = modules[0].get_submodule("0").weight
    return [step.gradients for step in plain_training(modules, batches(steps, microbatches), microbatches)]
