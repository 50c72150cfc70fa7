"""What the ranks run in `test_links`: training over shared links, with copies that are slow enough to overlap."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch

from optpipe.schedule import Schedule
from optpipe_runtime import Layout, Pipeline
from optpipe_runtime.memory import pci
from optpipe_runtime.memory.engines import CopyEngine, Handle
from optpipe_runtime.memory.host_memory import HostPool, OnHost
from optpipe_runtime.memory.link import Link
from optpipe_runtime.ranks.team import Team
from optpipe_runtime.stage import runner
from support.ranks.cases import Gradients, batch, loss_fn, numbers, own_stages, pipeline

COPY_S = 0.003  # what a copy lasts at least


class Transfer(NamedTuple):
    """When a rank's link was in use, by the clock that all processes have in common, in s."""

    link: str | None
    inward: bool
    start: float
    end: float


class Slow:
    def __init__(self, engine: CopyEngine, note: Callable[[float, float], None], s: float = COPY_S) -> None:
        self._engine, self._note, self._s = engine, note, s

    def run(self, work: Callable[[], object]) -> Handle:
        def slowly() -> None:
            start = time.monotonic()
            work()
            time.sleep(self._s)
            self._note(start, time.monotonic())

        return self._engine.run(slowly)

    def close(self) -> None:
        self._engine.close()


def train(
    schedules: Sequence[Schedule], alone: bool = False
) -> tuple[list[dict[int, float]], list[Gradients], list[Transfer]]:
    """One step with each schedule, all of one layout: losses by micro-batch, gradients, and every transfer. `alone`: no
    rank waits for its turn."""
    layout = Layout.from_problem(schedules[0].problem)
    modules, rank = own_stages(layout.placement), torch.distributed.get_rank()
    seen: list[Transfer] = []

    class SlowOnHost(OnHost):
        def __init__(self, link: Link, pool: HostPool) -> None:
            super().__init__(link, pool)
            self.inward = False

        def bring_back(self, targets: Any) -> Sequence[Handle]:
            self.inward = True
            return super().bring_back(targets)

        def _start(self, engine: CopyEngine, copies: Any) -> Sequence[Handle]:
            inward = self.inward
            slow: Any = Slow(engine, lambda start, end: seen.append(Transfer(layout.link(rank), inward, start, end)))
            return super()._start(slow, copies)

    losses, gradients = [], []
    with mock.patch.object(runner, "OnHost", SlowOnHost), pipeline(modules, schedules[0]) as pipe:
        for token, _ in pipe.runner.rank.link._shared if alone else ():
            token._pass = lambda transfer, other: None  # type: ignore[method-assign]
        for schedule in schedules:
            pipe.load(schedule)
            for module in modules.values():
                module.zero_grad()
            report = pipe.step(*batch(0, layout.microbatches))
            losses.append(dict(enumerate(report.losses or ())))
            gradients.append(numbers(modules))
    return losses, gradients, seen


def allocations(schedules: Sequence[Schedule], steps: int) -> tuple[int, int, int]:
    """Trains by each schedule in turn: bytes allocated for the host while ops run; what they used at most, and what the
    plans said."""
    layout = Layout.from_problem(schedules[0].problem)
    allocated = used = reserved = 0
    with Pipeline(own_stages(layout.placement), layout.placement, loss_fn, layout.microbatches) as pipe:
        pool, run = pipe.runner.rank.pool, pipe.runner.executor.run

        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal allocated
            before = pool._allocated
            report = run(*arguments, **options)
            allocated += pool._allocated - before
            return report

        pipe.runner.executor.run = counted  # type: ignore[method-assign]
        for step in range(steps):
            pipe.load(schedules[step % len(schedules)])
            used = max(used, pipe.step(*batch(step, layout.microbatches)).host_peak_bytes)
            sizes = {
                s: [pool.size(nbytes) for nbytes in stage.part_bytes(2)] for s, stage in pipe.runner.rank.stages.items()
            }
            reserved = max(reserved, pipe.plan.host_peak(lambda s, j, part, sizes=sizes: sizes[s][part]))  # type: ignore[misc]
    return allocated, used, reserved


def meet(members: Sequence[int]) -> bool:
    """Whether this rank is one of them, and has met the others."""
    team, cpu = Team(), torch.device("cpu")
    group = team.subgroup(members, cpu)
    if team.number in members:
        group.meet(cpu)
    return team.number in members


def profile_on_one_port(links: Any) -> tuple[list[str | None], list[str]]:
    """Profiles two ranks as if their GPUs were below one PCIe switch: the links of the problem, and what is told."""
    rank = torch.distributed.get_rank()
    gpu = pci.Place("machine", f"0000:0{rank}:00.0", "0000:00:01.0", 0)
    with (
        mock.patch.object(pci, "place", return_value=gpu),
        Pipeline(own_stages([0, 1]), [0, 1], loss_fn, 2, links=links) as pipe,
    ):
        problem = pipe.profile(*batch(0, 2), activation_budget_bytes=2**30, repeats=1)
        assert pipe.measured
        return [device.link for device in problem.devices], pipe.measured.apart()
