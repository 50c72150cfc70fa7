"""Times, their spread, and the budget of a GPU, computed by hand with a fake clock and a fake device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from optpipe_runtime.measure import profiler
from optpipe_runtime.ranks.layout import Layout
from optpipe_runtime.stage.io import Spec, StageIO
from optpipe_runtime.stage.outside import Outside
from optpipe_runtime.stage.trial import OpTimer, Spread


class Ticking:
    """A clock that tells the given times, in ms."""

    def __init__(self, *times: float) -> None:
        self._times = iter(times)

    def mark(self) -> float:
        return next(self._times)

    def ms(self, start: float, end: float) -> float:
        return end - start


def test_median_and_interquartile_range() -> None:
    clock: Any = Ticking(0, 1, 10, 12, 20, 23, 30, 34, 40, 90)
    times = OpTimer(clock)
    times.recording = False
    with times.timing("forward_ms"):
        pass
    times.recording = True
    for _ in range(5):
        with times.timing("forward_ms"):
            pass
    spread = times.spreads()["forward_ms"]
    assert (spread.ms, spread.iqr_ms, spread.count) == (3.0, 2.0, 5)
    assert (times.spreads(0.5)["forward_ms"].ms, times.spreads(0.5)["forward_ms"].iqr_ms) == (1.5, 1.0)


def test_copies_of_all_parts_add_up_and_an_empty_part_takes_no_time() -> None:
    def handle(start: float, end: float) -> Any:
        return SimpleNamespace(start=start, end=end)

    clock: Any = Ticking()
    times = OpTimer(clock)
    times.copies("offload_ms", [[handle(1, 2), handle(2, 5)], [], [handle(8, 9)]])
    assert times.spreads()["offload_ms"] == Spread(5.0, 0.0, 1)


def test_routes_count_by_their_microbatches() -> None:
    assert Spread.mean([(1, Spread(10.0, 1.0, 7)), (3, Spread(2.0, 0.5, 9))]) == Spread(4.0, 1.0, 16)


def test_the_budget_of_a_gpu_leaves_room_for_gradients_and_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = {0: nn.Linear(10, 10, bias=False), 1: nn.Linear(10, 10)}
    stages[1].bias.requires_grad_(False)
    stages[1].weight.grad = torch.zeros(10, 10)
    runners = {
        s: SimpleNamespace(
            module=module,
            outside=Outside(None, module),
            buffer_bytes=0,
            split=SimpleNamespace(casts=SimpleNamespace(nbytes=100 * s)),
        )
        for s, module in stages.items()
    }
    passed = Spec((10,), torch.float32, True)
    sends = StageIO((passed,), False, False, outputs=(passed,), reached=(frozenset({0}),), needed=(0,))
    rank: Any = SimpleNamespace(
        device=torch.device("cuda"),
        stages=runners,
        number=0,
        layout=Layout.make([0, 0, 1], 2),
        io={(0, 0): sends, (1, 0): sends},
        replicas=SimpleNamespace(parameters=lambda s: stages[s].parameters(), gradient_bytes=lambda s: 0),
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7_000, 80_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5_000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2_000)
    messages = 2 * 40 + 2 * 40
    assert profiler.budget(rank, {}) == int(0.9 * (7_000 + 3_000 - 400 - 100 - messages)), "one has no gradient yet"
    found = {parameter: 600 for stage in stages.values() for parameter in stage.parameters()}
    assert profiler.budget(rank, found) == int(0.9 * (7_000 + 3_000 - 600 - 200 - 100 - messages)), "larger than there"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 80_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2_000)
    assert profiler.budget(rank, {}) == 0
