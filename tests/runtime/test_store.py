"""Offloaded tensors really leave: weak references show freed storages, and using an offloaded tensor raises. They leave
the process, too: its own memory, as the kernel counts it, falls at D and grows at R. That reloaded bytes are the same
is in `test_odd_stages`."""

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.ranks import cases
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from optpipe.errors import InputError, OptPipeError
from optpipe.model.ops import Kind
from optpipe_runtime.memory.activation import OffloadedError, balance
from optpipe_runtime.memory.host_memory import PAGE, HostPool
from optpipe_runtime.memory.link import Link
from optpipe_runtime.stage.levels import FULL, LEVELS, Level
from optpipe_runtime.stage.runner import StageRunner, learn

CPU = torch.device("cpu")
SHAPE = (2, cases.LENGTH, cases.WIDTH)


def make(module: nn.Module, link: Link) -> tuple[StageRunner, HostPool]:
    pool = HostPool(CPU)
    stage = StageRunner(0, module, CPU, link, pool)
    learn(stage, (torch.zeros(SHAPE, requires_grad=True),))
    stage.start_step((), 1)
    return stage, pool


@pytest.mark.parametrize("module", [nn.Linear(cases.WIDTH, cases.WIDTH), nn.Flatten()])
def test_the_received_input_is_freed_too(link: Link, module: nn.Module) -> None:
    """At once if nothing has saved it. Whoever uses it while it is away gets an error."""
    stage, _ = make(module, link)
    x = torch.randn(SHAPE)
    memory, saves = StorageWeakRef(x.untyped_storage()), isinstance(module, nn.Linear)
    stage.forward(0, (x,))
    del x
    assert (stage.held_bytes(0) > 0) == (not memory.expired()) == saves
    stage.offload(0, 0)
    stage.drop(0, 0)
    assert memory.expired()
    if saves:
        with pytest.raises(OffloadedError, match="while it is offloaded"):
            stage.backward(0, (torch.randn(SHAPE),), split=False)


class Remembering(nn.Module):
    """Keeps a reference to what it saved, as modules with a cache do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(cases.WIDTH, cases.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.last = torch.exp(x)
        result: Tensor = self.inner(self.last)
        return result


def test_blocks_that_something_else_holds_are_found(link: Link) -> None:
    stage, pool = make(Remembering(), link)
    assert stage.io[0].shared_blocks == {0}
    assert stage.io[0].block_bytes == (0,)
    stage.forward(0, (torch.randn(SHAPE),))
    held = stage.held_bytes(0)
    stage.offload(0, 0)
    stage.drop(0, 0)
    assert stage.held_bytes(0) == held
    assert pool.peak_bytes == 0, "nothing that stays anyway is copied"


def test_parameters_buffers_and_views_of_them_are_no_activations(link: Link) -> None:
    norm = nn.BatchNorm1d(cases.LENGTH).eval()
    stage, _ = make(norm, link)
    stage.forward(0, (torch.randn(SHAPE),))
    x_bytes = torch.zeros(SHAPE).nbytes
    assert stage.held_bytes(0) == x_bytes


def test_a_recompute_leaves_random_numbers_as_they_are(link: Link) -> None:
    stage, _ = make(cases.Block(dropout=0.5), link)
    stage.forward(0, (torch.randn(SHAPE),), recompute=FULL)
    assert stage.held_bytes(0) == torch.zeros(SHAPE).nbytes
    torch.rand(3)  # others draw in between
    state = torch.get_rng_state()
    stage.recompute(0)
    assert torch.equal(state, torch.get_rng_state())


def test_the_host_pool_is_capped_and_its_pages_are_used_again() -> None:
    page = PAGE["cpu"]
    pool = HostPool(CPU, limit=3 * page + 1)
    pages = pool.take(page + 1)
    assert [len(one) for one in pages] == [page, page]
    with pytest.raises(OptPipeError, match=r"^host_memory_bytes = 3\.15 MB: 2\.1 MB are allocated and 2\.1 MB more "):
        pool.take(page + 1)
    pool.give(pages)
    again = pool.take(3 * page)  # whatever was given back fits, and only what is missing is allocated
    assert {one.data_ptr() for one in again} > {one.data_ptr() for one in pages}
    assert pool.peak_bytes == 3 * page
    assert pool.take(0) == []


@given(st.lists(st.integers(0, 1000), max_size=30).map(tuple), st.integers(1, 8))
def test_parts_differ_by_one_block_at_most(sizes: tuple[int, ...], n: int) -> None:
    groups = balance(sizes, n)
    filled = [sum(sizes[i] for i in group) for group in groups]
    assert sorted(i for group in groups for i in group) == [i for i, size in enumerate(sizes) if size]
    assert max(filled) - min(filled) <= max(sizes, default=0)


def jagged_tanh(x: Tensor) -> Tensor:
    """By a nested tensor, which no store owns."""
    lengths = torch.tensor([0, 1, x.numel() // cases.WIDTH])
    return torch.nested.nested_tensor_from_jagged(x.reshape(-1, cases.WIDTH), lengths).tanh().values().view_as(x)


class Then(nn.Module):
    def __init__(self, last: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(cases.WIDTH, cases.WIDTH), last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


@pytest.mark.parametrize("function", [torch.tanh, torch.relu, partial(torch.softmax, dim=-1), jagged_tanh])
def test_forwards_that_learn_a_stage_leave_nothing(link: Link, function: Callable[[Tensor], Tensor]) -> None:
    """A node that saves its own output keeps the graph before it for ever, if a hook returns that output itself."""
    noted: list[StorageWeakRef] = []

    def noting(x: Tensor) -> Tensor:
        y = function(x)
        noted.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in (x, y))
        return y * 2

    make(Then(noting), link)
    gc.collect()
    assert [memory.expired() for memory in noted] == [True] * 6


@pytest.mark.parametrize("backward", [None, Kind.B])
def test_nothing_is_held_after_a_step(link: Link, backward: Kind | None) -> None:
    stage, _ = make(cases.Block(), link)
    gc.collect()
    gc.disable()
    try:
        x = torch.randn(SHAPE)
        memory = StorageWeakRef(x.untyped_storage())
        stage.forward(0, (x,), backward=backward, captured=backward is None)
        del x
        stage.backward(0, (torch.randn(SHAPE),), split=True)
        stage.weight(0)
        assert memory.expired(), "no reference cycle keeps it until the next collection"
        assert stage.idle
    finally:
        gc.enable()


class Changing(nn.Module):
    """Changes in place what autograd has saved: of an activation, or of a buffer."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.register_buffer("scale", torch.ones(cases.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.exp(x)
        z = y * self.scale
        if self.what == "activation":
            y += 1
        elif self.what == "buffer":
            self.scale += 1
        else:
            y.detach().exp_()  # its node is not part of what the output came from
            z = x * 2
        return z


@pytest.mark.parametrize("what", ["activation", "buffer"])
@pytest.mark.parametrize("recompute", [FULL, LEVELS["cheap"], None])
@pytest.mark.parametrize("captured", [True, False])
def test_a_tensor_changed_after_it_was_saved_is_an_error(
    link: Link, what: str, recompute: Level | None, captured: bool
) -> None:
    stage, _ = make(Changing(what), link)
    stage.forward(0, (torch.randn(SHAPE),), recompute=recompute, backward=Kind.B, captured=captured)
    if recompute:
        stage.recompute(0)
    with pytest.raises(InputError, match="changed in place after it was saved for the backward"):
        stage.backward(0, (torch.randn(SHAPE),), split=True)


def test_a_changed_tensor_that_is_not_needed_is_no_error(link: Link) -> None:
    stage, _ = make(Changing("nothing"), link)
    stage.forward(0, (torch.randn(SHAPE),))
    (dx,) = stage.backward(0, (torch.ones(SHAPE),), split=True)
    assert torch.equal(dx, torch.full(SHAPE, 2.0))


def test_an_output_that_the_stage_saved_leaves_as_a_copy(link: Link) -> None:
    module = nn.Sequential(nn.Linear(cases.WIDTH, cases.WIDTH), nn.ReLU())  # saves its own output
    stage, _ = make(module, link)
    (y,) = stage.forward(0, (torch.randn(SHAPE),))
    held, before = stage.held_bytes(0), y.clone()
    stage.offload(0, 0)
    stage.drop(0, 0)
    assert held > 0
    assert stage.held_bytes(0) == 0, "who got the output must not hold our memory"
    assert torch.equal(y, before)


# The memory of the process


BLOCK, BLOCKS = 36 << 20, 4  # bytes, and how many of them a forward saves
SLACK = BLOCK // 4  # what else comes and goes in the process


class Large(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(BLOCKS):
            x = torch.exp(x * 0.1)
        return x.sum()


def resident(kind: str) -> int:
    """Bytes of this process in memory: `Anon` is what programs allocate, `Shmem` what is mapped as shared."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"Rss{kind}:"))
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("split", [False, True])
def test_each_op_allocates_and_frees_the_bytes_it_should(link: Link, split: bool) -> None:
    gc.collect()  # what earlier tests left
    pool = HostPool(CPU)
    stage = StageRunner(0, Large(), CPU, link, pool)
    x = torch.ones(BLOCK // 4)
    learn(stage, (x[:2048].clone().requires_grad_(),))
    stage.start_step((x,), BLOCKS)
    stage.forward(0, (x[:2048].clone(),))
    stage.backward(0, (torch.ones(()),), split=False)  # torch loads what it needs
    device, host = resident("Anon"), resident("Shmem")

    def require(blocks: int, pages: int, where: str) -> None:
        assert abs(resident("Anon") - device - blocks * BLOCK) < SLACK, (
            f"{where}: {(resident('Anon') - device) / BLOCK} blocks"
        )
        assert abs(resident("Shmem") - host - pages * BLOCK) < SLACK, (
            f"{where}: {(resident('Shmem') - host) / BLOCK} blocks on the host"
        )
        assert stage.held_bytes(0) == blocks * BLOCK

    stage.forward(0, (x.requires_grad_(),))
    require(BLOCKS, 0, "F")
    for k in range(BLOCKS):
        for handle in stage.offload(0, k):
            handle.wait()
        require(BLOCKS - k, k + 1, f"O.{k}")
        stage.drop(0, k)
        require(BLOCKS - k - 1, k + 1, f"D.{k}")
    for k in range(BLOCKS):
        for handle in stage.reload(0, k):
            handle.wait()
        require(k + 1, BLOCKS, f"R.{k}")
    stage.backward(0, (torch.ones(()),), split)
    require(0, BLOCKS, "B")  # where W is still to come, it needs nothing
    again = pool.take(BLOCKS * BLOCK)
    again[-1].zero_()
    require(0, BLOCKS, "pages are used again")
    stage = StageRunner(0, Large(), CPU, link, HostPool(CPU))
    del pool, again
    require(0, 0, "pages go with their pool")
