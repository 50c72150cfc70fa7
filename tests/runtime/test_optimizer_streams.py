"""An optimizer on the host with the copy engine of a GPU, on simulated streams: no accesses to parameters, gradients or
host memory race."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.fakes import cuda as fake_cuda
from support.fakes.cuda import CPU, CUDA, SHAPE, Unordered
from support.ranks import cases

from optpipe_runtime.features.host_updates import HostOptimizer
from optpipe_runtime.memory import link as link_module
from optpipe_runtime.memory.engines import StreamEngine
from optpipe_runtime.memory.host_pool import HostPool
from optpipe_runtime.memory.link import Link
from optpipe_runtime.stage.learn import learn
from optpipe_runtime.stage.runner import StageRunner


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


class Impatient(HostOptimizer):
    """Forwards do not wait for the parameters."""

    def wait_in(self) -> None:
        pass


class Careless(HostOptimizer):
    """Gradients are let go before they are on the host."""

    def gradients_out(self) -> Any:
        found = super().gradients_out()
        for entry in self._parameters:
            entry.leaving = None
        torch.zeros(1)  # whoever allocates next
        return found


def races(kind: type[HostOptimizer] = HostOptimizer, engine: Any = StreamEngine, full_duplex: bool = True) -> list[str]:
    """What raced in three steps of a stage with two micro-batches."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        simulation = fake_cuda.Races(monkeypatch)
        compute = simulation._compute
        monkeypatch.setattr(fake_cuda.Event, "query", lambda event: compute.wait_event(event) is None, raising=False)
        monkeypatch.setattr(link_module, "copy_engine", lambda device: engine(CUDA))
        link = Link(CPU, full_duplex)
        stage = StageRunner(0, cases.Block(), CPU, link, HostPool(CPU))
        learn(stage, (torch.zeros(SHAPE, requires_grad=True),))
        host = kind(
            0, stage.module.named_parameters(), lambda named: torch.optim.AdamW(named), link, Immediate(), lambda: None
        )
        with simulation:
            for _ in range(3):
                stage.start_step((), 1)
                host.start_step()
                host.parameters_in()
                for j in range(2):
                    host.wait_in()
                    stage.forward(j, (torch.randn(SHAPE),))
                for j in range(2):
                    stage.backward(j, (torch.ones(SHAPE),), split=False)
                host.gradients_out()
                host.update()
                host.wait_update()
    return simulation.found


@pytest.mark.parametrize("full_duplex", [False, True])
def test_nothing_races(full_duplex: bool) -> None:
    assert races(full_duplex=full_duplex) == []


@pytest.mark.parametrize(
    ("kind", "engine", "raced"),
    [
        (Impatient, StreamEngine, "and copy_.default"),
        (Careless, StreamEngine, "its end and copy_.default"),
        (HostOptimizer, Unordered, "copy_.default and "),
    ],
)
def test_the_simulation_finds_unordered_accesses(kind: type[HostOptimizer], engine: Any, raced: str) -> None:
    assert any(raced in found for found in races(kind, engine))
