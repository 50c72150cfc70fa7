"""What the ranks run in `test_reductions`: trainings of two replicas of a V of four stages on two ranks."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline
from optpipe_runtime.execute.reductions import Reductions
from optpipe_runtime.ranks.replicas import Replicas
from optpipe_runtime.stage.runner import StageRunner
from support.ranks.cases import LENGTH, Gradients, batch, loss_fn, make_stages, plain_step, sgd
from support.ranks.replicas import gradients, parameters, place, wrapped
from support.ranks.swaps import failing

PLACEMENT = [0, 1, 1, 0]
PATIENCE_S = 120.0


class Turn(NamedTuple):
    """One step. `load`: which schedule, by its place. `memory`: the first rank runs out of memory in it. `length`: of
    the first replica's sequences. `awaits`: the first replica's last op waits until the reduction of the rank's other
    stage has come so far."""

    load: int | None = None
    memory: bool = False
    length: int = LENGTH
    awaits: str | None = None


class Ran(NamedTuple):
    """On one rank. `events`: of each step, in their order: ops as they begin, "gathers" as a stage begins to be
    gathered, "starts" and "ended" of stages' reductions. `held`: of each step, the bytes of gathered parameters and
    their gradients as ops begin. `gathered`: their peak and what is certified."""

    events: list[list[str]]
    losses: list[list[float] | None]
    gradients: list[Gradients]
    norms: list[float]
    parameters: Gradients
    versions: list[int]
    held: list[dict[str, int]]
    gathered: list[tuple[int | None, int]]


class Events:
    """Of one step of a rank."""

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
) -> Ran:
    """Each replica trains by its own schedules. `late`: gradients are reduced when the step has ended. `tied`: a layer
    of the first stage is tied to that of the second. `shared`: the head's weight is the embedding's."""
    here, m = place(), schedules[0][0].problem.microbatches
    number, replica = here.number, here.replica
    own = {s: module for s, module in enumerate(make_stages(4)) if PLACEMENT[s] == number}
    if shared and number == 0:
        own[3].get_submodule("2").weight = own[0].get_submodule("0").weight
    modules = {s: wrapped(module, how) for s, module in own.items()}
    optimizer = sgd(*modules.values())
    ran = Ran([], [], [], [], {}, [], [], [])
    with Pipeline(modules, PLACEMENT, loss_fn, m, group=here.group) as pipe:
        if tied:
            pipe.tie(_norm(own[number]))
        for step, turn in enumerate(turns):
            if turn.load is not None:
                pipe.load(schedules[replica][turn.load])
            optimizer.zero_grad()
            data = here.batch(step, m)
            if replica == 0:
                data = [part[:, : turn.length].contiguous() for part in data]
            events = Events()
            with ExitStack() as around:
                around.enter_context(recorded(pipe, events, m, turn.awaits if replica == 0 and not late else None))
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
    return ran._replace(parameters=parameters(modules))


def _norm(stage: nn.Module) -> nn.Module:
    return next(module for module in stage.modules() if isinstance(module, nn.LayerNorm))


@contextmanager
def recorded(pipe: Pipeline, events: Events, microbatches: int, awaits: str | None) -> Iterator[None]:
    """Tells the events of a step. The rank's last backward waits until the reduction of its other stage has `awaits`
    ("starts" or "ended")."""

    def told(kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def op(stage: StageRunner, j: int, *arguments: Any, **options: Any) -> Any:
            if awaits and kind == "B" and stage.index < 2 and j == microbatches - 1:
                events.wait(f"{awaits} {3 - stage.index}")
            events.held[f"{stage.index}{kind}{j}"] = pipe._rank.replicas.held_bytes()
            events.tell(f"{stage.index}{kind}{j}")
            return real(stage, j, *arguments, **options)

        return op

    def reduction(s: int) -> Any:
        read, reduce = Replicas.reduction(pipe._rank.replicas, s)

        def told() -> None:
            events.tell(f"starts {s}")
            reduce()
            events.tell(f"ended {s}")

        return read, told

    def gather(s: int) -> None:
        if s not in pipe._rank.replicas._gathered:
            events.tell(f"gathers {s}")
        Replicas.gather(pipe._rank.replicas, s)

    ops = {"F": "forward", "B": "backward", "W": "weight"}
    recording = {name: told(kind, getattr(StageRunner, name)) for kind, name in ops.items()}
    with (
        mock.patch.multiple(pipe._rank.replicas, reduction=reduction, gather=gather),
        mock.patch.multiple(StageRunner, **recording),
    ):
        yield


def plain_shared(microbatches: int, steps: int) -> list[Gradients]:
    """In one process, with the head's weight that is the embedding's: gradients of each step."""
    torch.set_num_threads(1)
    modules = dict(enumerate(make_stages(4)))
    modules[3].get_submodule("2").weight = modules[0].get_submodule("0").weight
    optimizer = sgd(*modules.values())
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        plain_step(modules.values(), *batch(step, microbatches), microbatches)
        found.append(gradients(modules))
        optimizer.step()
    return found
