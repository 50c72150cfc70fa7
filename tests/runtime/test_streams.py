"""The copy engine of a GPU on simulated streams: in no schedule do a copy and a computation race for memory, nor do
accesses to parameters, gradients or host memory with an optimizer on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.fakes.cuda import CPU, CUDA, SHAPE, Event, Races, Unordered
from support.problems.strategies import schedules
from support.ranks import cases
from support.ranks.programs import programs

from optpipe.model.ops import Kind, Op
from optpipe.schedule import Schedule
from optpipe_runtime.features.host_optimizer import HostOptimizer
from optpipe_runtime.memory import link as link_module
from optpipe_runtime.memory.engines import StreamEngine
from optpipe_runtime.memory.host_memory import HostPool
from optpipe_runtime.memory.link import Link
from optpipe_runtime.stage.runner import StageRunner, learn

(AWAY,) = programs("0F0 0O0 0O0.1 0F1 0D0 0D0.1 0O1 0D1 0R0.1 0R0 0O1.1 0BW0 0D1.1 0R1 0R1.1 0BW1")
PROBLEM = cases.problem([0], 3, offload_parts=2)


@contextmanager
def simulated(engine: Any, full_duplex: bool) -> Iterator[tuple[Races, Link, StageRunner]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        simulation = Races(monkeypatch)
        compute = simulation._compute
        monkeypatch.setattr(Event, "synchronize", lambda event: compute.wait_event(event), raising=False)
        monkeypatch.setattr(link_module, "copy_engine", lambda device: engine(CUDA))
        link = Link(CPU, full_duplex)
        stage = StageRunner(0, cases.Block(), CPU, link, HostPool(CPU))
        learn(stage, (torch.zeros(SHAPE, requires_grad=True),))
        yield simulation, link, stage


def races(ops: list[Op], full_duplex: bool, engine: Any = StreamEngine) -> list[str]:
    with simulated(engine, full_duplex) as (simulation, _, stage):
        stage.start_step((), 2)
        with simulation:
            for op in ops * 2:
                run(stage, op)
        assert stage.idle
    return simulation.found


def run(stage: StageRunner, op: Op) -> None:
    kind, _, j, part = op
    match kind:
        case Kind.F:
            stage.forward(j, (torch.randn(SHAPE),))
        case Kind.B | Kind.BW:
            stage.backward(j, (torch.ones(SHAPE),), split=kind == Kind.B)
        case Kind.W:
            stage.weight(j)
        case Kind.O:
            stage.offload(j, part)
        case Kind.D:
            stage.drop(j, part)
        case Kind.R:
            stage.reload(j, part)
        case Kind.C:
            raise AssertionError("nothing is recomputed here")


@settings(max_examples=examples(10))
@given(st.data(), st.booleans())
def test_no_schedule_races(data: Any, full_duplex: bool) -> None:
    kept = PROBLEM.replace(
        stages=[stage.model_copy(update={"recompute_ms": None, "checkpoint_bytes": None}) for stage in PROBLEM.stages]
    )
    schedule: Schedule = data.draw(schedules(kept))
    assert races(schedule.programs[0].ops(), full_duplex) == []


class Unawaited(StreamEngine):
    """Nobody waits for a copy."""

    def run(self, work: Any) -> Any:
        handle = super().run(work)
        handle.wait = lambda: None  # type: ignore[method-assign]
        return handle


@pytest.mark.parametrize("full_duplex", [False, True])
@pytest.mark.parametrize(
    ("engine", "raced"), [(Unordered, "copy_.default and its allocation"), (Unawaited, "its end and copy_.default")]
)
def test_the_simulation_finds_unordered_accesses(engine: Any, raced: str, full_duplex: bool) -> None:
    ops = [Op.parse(text) for text in AWAY]
    assert races(ops, full_duplex) == []
    assert raced in races(ops, full_duplex, engine)


# An optimizer on the host


class Immediate:
    """Works at once; what the host waits for is in the past of all that it enqueues."""

    start = end = None

    def run(self, work: Callable[[], object]) -> Immediate:
        work()
        return self

    def wait(self) -> None:
        pass

    def close(self) -> None:
        pass


def races_in_steps(engine: Any = StreamEngine, full_duplex: bool = True) -> list[str]:
    with simulated(engine, full_duplex) as (simulation, link, stage):
        parameters = stage.module.named_parameters()
        host = HostOptimizer(0, parameters, lambda named: torch.optim.AdamW(named), link, Immediate())
        with simulation:
            for _ in range(3):
                stage.start_step((), 1)
                host.start_step()
                host.parameters_in()
                for j in range(2):
                    host.freshen()
                    stage.forward(j, (torch.randn(SHAPE),))
                for j in range(2):
                    stage.backward(j, (torch.ones(SHAPE),), split=False)
                host.gradients_out()
                host.update()
                host.wait_update()
    return simulation.found


@pytest.mark.parametrize("full_duplex", [False, True])
def test_no_step_of_an_optimizer_races(full_duplex: bool) -> None:
    assert races_in_steps(full_duplex=full_duplex) == []
    assert any("copy_.default and " in found for found in races_in_steps(Unordered, full_duplex))
