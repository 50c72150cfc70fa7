"""Host memory is allocated once, in the exact size, and stays locked while it is used. An engine keeps its order after
a failure."""

import mmap
import os
import resource
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.problems.strategies import schedules
from support.ranks import cases, links
from support.ranks.worker import Ranks

from optpipe.errors import OptPipeError
from optpipe.schedule import Schedule
from optpipe.text import bytes_text, distinct_sizes
from optpipe_runtime.memory import host_memory, pci
from optpipe_runtime.memory.engines import ThreadEngine
from optpipe_runtime.memory.host_memory import PAGE, HostPool, OnHost
from optpipe_runtime.memory.link import Link

PATIENCE_S = 60.0
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@settings(max_examples=examples(2))
@given(st.data(), st.sampled_from([[0, 1], [0, 1, 1, 0]]))
def test_no_step_allocates(ranks: Ranks, data: Any, placement: list[int]) -> None:
    """Not even the first of ten, before which no sizes are known; what is used is what was reserved."""
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


class Driver:
    """Plays CUDA's runtime; that this does what it says is not measured. `result` of locking: 0 for success."""

    def __init__(self, patch: pytest.MonkeyPatch, result: int = 0) -> None:
        self.told: list[Any] = []
        self.cpus: set[int] = set()  # where the thread that locked could run
        self.idle, self.unlocked = threading.Event(), threading.Event()  # the device; and memory, once it is idle
        self.idle.set()
        self._result = result
        properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
        for name, fake in {
            "cudart": lambda: self,
            "check_error": self.check,
            "set_device": lambda device: self.told.append(("device", device, threading.current_thread())),
            "synchronize": self.synchronize,
            "get_device_properties": lambda device: properties,
        }.items():
            patch.setattr(torch.cuda, name, fake)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.told.append(("lock", address, nbytes, flags))
        self.cpus = os.sched_getaffinity(0)
        return self._result

    def cudaHostUnregister(self, address: int) -> int:
        self.told.append(("unlock", address))
        self.unlocked.set()
        return 0

    def synchronize(self, device: torch.device) -> None:
        assert self.idle.wait(PATIENCE_S)
        self.told.append(device)

    def check(self, result: int) -> None:
        if result:
            raise RuntimeError("out of memory (2)")


def test_locked_memory_has_the_exact_size_and_is_unlocked_before_it_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, pool = Driver(monkeypatch), HostPool(CUDA)
    nbytes = 130 << 20  # of which torch's own pinned memory would take 256 MiB
    pool.reserve(nbytes)
    locked = pool.size(nbytes)
    assert nbytes <= locked < nbytes + PAGE["cuda"]
    page = pool.take(1)[0]
    (_, device, thread), (_, address, *_) = driver.told
    assert driver.told[1:] == [("lock", address, locked, 1)]
    assert device == CUDA, "and not the first device, on which a new thread would start CUDA"
    assert thread is not threading.current_thread(), "an error would be reported by this thread's next kernel"
    assert address % mmap.PAGESIZE == 0
    assert address <= page.data_ptr() < address + locked
    del pool
    assert len(driver.told) == 2, "a page is still in use"
    driver.idle.clear()
    del page  # waits for no device, which may never be idle again
    assert ("unlock", address) not in driver.told
    driver.idle.set()
    assert driver.unlocked.wait(PATIENCE_S)
    (_, device, _), *told = driver.told[2:]
    assert device == CUDA
    assert told == [CUDA, ("unlock", address)], "nothing is unlocked under a copy"


def test_large_memory_is_locked_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the training could launch nothing for seconds."""
    monkeypatch.setattr(host_memory, "PIECE", 2 * PAGE["cuda"])
    driver, pool = Driver(monkeypatch), HostPool(CUDA)
    pages = pool.take(5 * PAGE["cuda"])
    locked = {address: nbytes for what, address, nbytes, *_ in driver.told[1::2]}
    assert list(locked.values()) == [2 * PAGE["cuda"], 2 * PAGE["cuda"], PAGE["cuda"]]
    for page in pages:  # each in one piece: no copy may cross the end of what was locked at once
        assert any(first <= page.data_ptr() <= first + size - PAGE["cuda"] for first, size in locked.items())


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


GPU = "sys/bus/pci/devices/0000:3b:00.0/numa_node"


@pytest.mark.parametrize(
    ("node", "text", "cpus"),
    [
        ("1\n", "0\n", {0}),
        ("1\n", "0-3,8-9,12\n", {0, 1, 2, 3, 8, 9, 12}),
        ("1\n", "\n", set()),
        ("-1\n", "0\n", set()),
        ("odd", "0\n", set()),
        (None, "0\n", set()),
    ],
)
def test_memory_is_locked_near_the_gpu_if_the_system_tells(
    node: str | None, text: str, cpus: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"sys/devices/system/node/node1/cpulist": text} | ({} if node is None else {GPU: node})
    monkeypatch.setattr(pci, "ROOT", written(tmp_path, files))
    driver, before = Driver(monkeypatch), os.sched_getaffinity(0)
    assert pci.cpus_near("0000:3b:00.0") == cpus
    HostPool(CUDA).reserve(1)
    assert driver.cpus == (cpus & before or before)
    assert os.sched_getaffinity(0) == before, "of the thread that locks only"


def test_memory_that_cannot_be_locked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch, result=2)
    limit = (1 << 20, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1])
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limit)
    with pytest.raises(
        OptPipeError,
        match=rf"^{bytes_text(PAGE['cuda'])} of host memory could not be page-locked: out of memory \(2\); a process "
        r"may lock 1.05 MB \(ulimit -l\)$",
    ):
        HostPool(CUDA).reserve(1)


def test_memory_that_cannot_be_mapped_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "free_bytes", lambda: None)
    monkeypatch.setattr(host_memory, "PIECE", 1 << 60)
    with pytest.raises(OptPipeError, match=r"^1150000 TB of host memory could not be allocated: \[Errno 12\]"):
        HostPool(CPU).reserve(1 << 60)


CGROUP = "sys/fs/cgroup/"
FREE = {
    "proc/meminfo": "MemTotal: 900 kB\nMemFree: 100 kB\nMemAvailable:     500 kB\n",
    "proc/self/cgroup": "0::/job/step\n",
}
LIMIT = {
    CGROUP + "job/memory.max": "300000\n",
    CGROUP + "job/memory.current": "200000\n",
    CGROUP + "job/memory.stat": "anon 1\ninactive_file 50000\n",
    CGROUP + "job/step/memory.max": "max\n",
}


@pytest.mark.parametrize(
    ("files", "free"),
    [({}, None), (FREE, 512_000), (FREE | LIMIT, 150_000), (FREE | LIMIT | {CGROUP + "job/memory.max": "9"}, 0)],
)
def test_what_the_system_can_give_is_known_before(
    files: dict[str, str], free: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "ROOT", written(tmp_path, files))
    assert host_memory.free_bytes() == free
    if free is not None:
        needed, left = distinct_sizes(PAGE["cpu"], free)
        with pytest.raises(OptPipeError, match=f"^{needed} of host memory are needed, and {left} are free$"):
            HostPool(CPU).reserve(1)


def test_a_step_takes_pages_while_others_are_being_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, begun, go_on, allocate = HostPool(CPU), threading.Event(), threading.Event(), host_memory.allocate
    pool.reserve(2 * PAGE["cpu"])

    def slow(nbytes: int, device: torch.device) -> Any:
        begun.set()
        assert go_on.wait(60)
        return allocate(nbytes, device)

    monkeypatch.setattr(host_memory, "allocate", slow)
    beside = threading.Thread(target=pool.reserve, args=(4 * PAGE["cpu"],))
    beside.start()
    assert begun.wait(60)
    pages = pool.take(2 * PAGE["cpu"])
    pool.give(pages[:1])
    assert pool.peak_bytes == 2 * PAGE["cpu"]
    go_on.set()
    beside.join(60)
    more = pool.take(3 * PAGE["cpu"])
    assert len({page.data_ptr() for page in [*pages, *more]}) == 4
    assert pool.peak_bytes == 4 * PAGE["cpu"]


def test_transfers_after_a_failed_one_fail() -> None:
    """It would run out of turn."""
    lane, done = ThreadEngine(), []
    first, second = lane.run(lambda: 1 / 0), lane.run(lambda: done.append(1))
    for handle in (first, second):
        with pytest.raises(ZeroDivisionError):
            handle.wait()
    assert done == []
    lane.close()
