"""Host memory is allocated once, in the exact size, and stays locked while it is used. An engine keeps its order after
a failure."""

from __future__ import annotations

import mmap
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ranks import cases, links
from support.ranks.worker import Ranks
from support.strategies import schedules

from optpipe.schedule import Schedule
from optpipe_runtime.memory.engines import ThreadEngine
from optpipe_runtime.memory.host_pool import PAGE, HostMemory, HostPool, OnHost
from optpipe_runtime.memory.link import Link

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@settings(max_examples=2)
@given(st.data(), st.sampled_from([[0, 1], [0, 1, 1, 0]]))
def test_no_step_allocates(ranks: Ranks, data: Any, placement: list[int]) -> None:
    """Of ten steps by four schedules none allocates, not even the first, before which nothing was known of sizes; what
    is used is what was reserved."""
    problem = cases.problem(placement, 3, offload_parts=2)
    chosen: list[Schedule] = [data.draw(schedules(problem)) for _ in range(4)]
    for allocated, used, reserved in ranks(links.allocations, schedules=chosen, steps=10):
        assert allocated == 0
        assert used == reserved


def test_copies_across_pages_lose_nothing() -> None:
    link, pool = Link(CPU, False), HostPool(CPU)
    sizes = [1, PAGE["cpu"] - 1, 3 * PAGE["cpu"], 0, 7, 2 * PAGE["cpu"] + 5]
    pieces = [torch.randint(256, (size,), dtype=torch.uint8) for size in sizes]
    destination = OnHost(link, pool)
    (out,) = destination.take_out(pieces)
    out.wait()
    assert pool.peak_bytes == pool.size(sum(sizes)) == 7 * PAGE["cpu"]
    targets = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    (back,) = destination.bring_back(targets)
    back.wait()
    assert all(map(torch.equal, pieces, targets))
    destination.release()
    assert pool.take(7 * PAGE["cpu"]), "given back"
    link.close()


def test_locked_memory_has_the_exact_size_and_is_unlocked_before_it_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's part is played; that it does what it says is not measured."""
    told: list[Any] = []
    driver = SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: told.append(("lock", address, nbytes, flags)) or 0,
        cudaHostUnregister=lambda address: told.append(("unlock", address)) or 0,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "check_error", lambda result: told.append(result))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: told.append(device))
    pool = HostPool(CUDA)
    nbytes = 130 << 20  # of which torch's own pinned memory would take 256 MiB
    pool.reserve(nbytes)
    locked = pool.size(nbytes)
    assert nbytes <= locked < nbytes + PAGE["cuda"]
    page = pool.take(1)[0]
    address = told[0][1]
    assert told == [("lock", address, locked, 1), 0]
    assert address % mmap.PAGESIZE == 0
    assert address <= page.data_ptr() < address + locked
    del pool
    assert len(told) == 2, "a page is still in use"
    del page
    assert told[2:] == [CUDA, ("unlock", address)], "nothing is unlocked under a copy"


def test_memory_on_cpu_is_not_locked() -> None:
    memory = HostMemory(-1, 8)
    memory.lock(CPU)
    assert memory.tensor().tolist() == [0] * 8


def test_transfers_after_a_failed_one_fail() -> None:
    """It would run out of turn."""
    lane, done = ThreadEngine(), []
    first, second = lane.run(lambda: 1 / 0), lane.run(lambda: done.append(1))
    for handle in (first, second):
        with pytest.raises(ZeroDivisionError):
            handle.wait()
    assert done == []
    lane.close()
