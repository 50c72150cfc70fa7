"""Ranks that share a host link use it in order: gradients are those of a plain run, and no two transfers of a channel
overlap. And which GPUs share one, as sysfs tells it on machines whose trees others have published: the trees are
written here as files; nothing was measured on these machines."""

from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.close import joined, require_close
from support.examples import examples
from support.problems.strategies import schedules
from support.ranks import cases
from support.ranks import links as rank_links
from support.ranks.links import Transfer
from support.ranks.worker import Ranks

from optpipe.errors import InputError, ScheduleError
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime import Layout, prepare
from optpipe_runtime.memory import pci
from optpipe_runtime.memory.link import require_queues, streams_used
from optpipe_runtime.memory.pci import Place, shared_links

OFFLOADED = [
    ["0F0", "0O0", "0F1", "0D0", "0O1", "0F2", "0D1", "0R0", "0BW0", "0R1", "0BW1", "0BW2"],
    ["1F0", "1O0", "1D0", "1R0", "1F1", "1BW0", "1O1", "1D1", "1R1", "1BW1", "1F2", "1BW2"],
]
ORDER = ["0O0", "1O0", "1R0", "0O1", "0R0", "1O1", "1R1", "0R1"]


def shared(
    placement: list[int], microbatches: int, links: list[str | None], mode: str = "half_duplex", **stage: Any
) -> Problem:
    problem = cases.problem(placement, microbatches, **stage)
    devices = [device.model_copy(update={"link": link}) for device, link in zip(problem.devices, links, strict=True)]
    return problem.replace(devices=devices, transfer_mode=mode)


def require_same(schedule: Schedule, results: list[Any], steps: int = 1) -> list[Transfer]:
    layout = Layout.from_problem(schedule.problem)
    (losses,), (gradients,) = cases.plain(len(layout.placement), layout.microbatches)
    for step in range(steps):
        assert results[layout.placement[-1]][0][step] == dict(enumerate(losses))
        require_close(joined(by_step[step] for _, by_step, _ in results), gradients)
    return [transfer for _, _, seen in results for transfer in seen]


def meetings(transfers: list[Transfer], full_duplex: bool) -> int:
    """How often a transfer begins on a lane of a shared link before the one before it has ended."""
    lanes: dict[Any, list[Transfer]] = {}
    for transfer in transfers:
        if transfer.link is not None:
            lanes.setdefault((transfer.link, full_duplex and transfer.inward), []).append(transfer)
    return sum(b.start < a.end for lane in lanes.values() for a, b in pairwise(sorted(lane, key=lambda t: t.start)))


@settings(max_examples=examples(3))
@given(st.data(), st.sampled_from([[0, 1], [0, 1, 1, 0], [1, 0, 1]]), st.sampled_from(["half_duplex", "full_duplex"]))
def test_two_ranks_use_a_shared_link_in_order(ranks: Ranks, data: Any, placement: list[int], mode: str) -> None:
    take_turns(ranks, data, shared(placement, 3, ["pcie0", "pcie0"], mode, offload_parts=2))


@settings(max_examples=examples(3))
@given(
    st.data(),
    st.sampled_from([[0, 1, 2, 3], [0, 1, 2, 3, 3, 2, 1, 0]]),
    st.sampled_from(["half_duplex", "full_duplex"]),
    st.sampled_from([["a", "a", "a", "a"], ["a", "a", "b", "b"], ["a", "b", "a", "b"], ["a", None, "a", "a"]]),
)
def test_four_ranks_use_shared_links_in_order(
    four_ranks: Ranks, data: Any, placement: list[int], mode: str, links: list[str | None]
) -> None:
    take_turns(four_ranks, data, shared(placement, 2, links, mode))


def take_turns(ranks: Ranks, data: Any, problem: Problem) -> None:
    """Two random schedules, the first of them again after the second: the token passes from step to step, too."""
    first, second = data.draw(schedules(problem)), data.draw(schedules(problem))
    results = ranks(rank_links.train, schedules=[first, second, first])
    assert meetings(require_same(first, results, steps=3), problem.transfer_mode == "full_duplex") == 0


@pytest.mark.parametrize("mode", ["half_duplex", "full_duplex"])
def test_without_tokens_transfers_overlap(ranks: Ranks, mode: str) -> None:
    """Else the tests above show nothing."""
    schedule = Schedule.parse(shared([0, 1], 3, ["pcie0", "pcie0"], mode), OFFLOADED, {"pcie0": ORDER})

    def met(alone: bool) -> int:
        results = ranks(rank_links.train, schedules=[schedule] * 4, alone=alone)
        return meetings(require_same(schedule, results, steps=4), mode == "full_duplex")

    assert met(alone=False) == 0
    assert any(met(alone=True) for _ in range(10))


def test_a_schedule_for_other_links_is_refused() -> None:
    problem = shared([0, 1], 3, ["pcie0", "pcie0"])
    schedule = Schedule.parse(problem, OFFLOADED, {"pcie0": ORDER})
    assert prepare(schedule, 0, Layout.make([0, 1], 3, links=["pcie0", "pcie0"])).link_orders
    for other, told in (
        (Layout.make([0, 1], 3), "over the link 'pcie0' from device 0, in this pipeline rank 0 has a link of its own"),
        (
            Layout.make([0, 1], 3, links=["a", "a"]),
            "over the link 'pcie0' from device 0, in this pipeline rank 0 has the link 'a'",
        ),
        (
            Layout.make([0, 1], 3, links=["pcie0"] * 2, full_duplex=True),
            "'pcie0' is half duplex in the schedule's problem, here full duplex",
        ),
    ):
        with pytest.raises(ScheduleError, match=told):
            prepare(schedule, 0, other)
    stays = Schedule.parse(problem, [[text for text in program if text[1] not in "ODR"] for program in OFFLOADED])
    assert prepare(stays, 0, Layout.make([0, 1], 3)).link_orders == (), "a link that is not used may differ"


@pytest.mark.parametrize(
    ("order", "told"),
    [
        (["1O0", "0O0", "0R0", "1R0", "0O1", "1O1", "1R1", "0R1"], "0R0 stands before 0O1"),
        (["0O0", "1O0", "0O1", "0R0", "1O1", "1R0", "1R1", "0R1"], "1O1 stands before 1R0"),
        (ORDER[1:], "has 7 entries"),
        (["0O0", "0O1", "0R0", "0R1", "1O0", "1R0", "1O1", "1R1"], "deadlock: 0BW0 waits for"),
    ],
)
def test_an_order_that_cannot_be_kept_is_refused(order: list[str], told: str) -> None:
    schedule = Schedule.parse(shared([0, 1], 3, ["pcie0", "pcie0"]), OFFLOADED, {"pcie0": order})
    for rank in range(2):
        with pytest.raises(ScheduleError, match=told):
            prepare(schedule, rank, Layout.from_problem(schedule.problem))


def test_the_digest_depends_on_the_order() -> None:
    layout = Layout.make([0, 1], 3, links=["pcie0", "pcie0"])
    other = ["1O0", "0O0", *ORDER[2:]]
    a, b = (Schedule.parse(shared([0, 1], 3, ["pcie0"] * 2), OFFLOADED, {"pcie0": order}) for order in (ORDER, other))
    assert prepare(a, 0, layout).digest != prepare(b, 0, layout).digest


def test_ranks_that_share_a_link_exchange_a_byte_before_any_step(four_ranks: Ranks) -> None:
    """Which only NCCL needs; gloo shows that nobody waits for ever."""
    assert four_ranks(rank_links.meet, members=[0, 1, 3]) == [True, True, False, True]


GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(("given", "fine"), [(None, False), ("1", False), ("many", False), ("32", True)])
def test_on_cuda_shared_links_need_queues(monkeypatch: pytest.MonkeyPatch, given: str | None, fine: bool) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given)
    shares = Layout.make([0, 1], 2, links=["a", "a"])
    require_queues(shares, 0, torch.device("cpu"))
    sentence = f"CUDA_DEVICE_MAX_CONNECTIONS is {given or 8}: set it to 32 before the script starts; links are shared"
    with nullcontext() if fine else pytest.raises(InputError, match=sentence):
        require_queues(shares, 0, GPU)


@pytest.mark.parametrize(
    ("layout", "used"),
    [
        (Layout.make([0, 0], 2), [1]),
        (Layout.make([0, 1, 2], 2), [4, 6, 4]),
        (Layout.make([0, 1, 2], 2, links=["a", "b", "c"], full_duplex=True), [5, 7, 5]),
        (Layout.make([0, 1, 2, 0, 1, 2], 2), [6, 6, 6]),
        (Layout.make([0, 1], 2, peers=[1, None]), [8, 8]),
        (Layout.make([0, 1], 2, links=["a", "a"], full_duplex=True), [7, 7]),
    ],
)
def test_on_cuda_every_stream_needs_a_queue(monkeypatch: pytest.MonkeyPatch, layout: Layout, used: list[int]) -> None:
    """A pipeline on one GPU needs none."""
    assert [streams_used(layout, rank) for rank in range(len(used))] == used
    for rank, needed in enumerate(used if not layout.shared_links else []):
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", str(needed))
        require_queues(layout, rank, GPU)
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", str(needed - 1))
        require_queues(layout, rank, torch.device("cpu"))
        told = pytest.raises(InputError, match=f"set it to {needed} .* rank {rank} uses {needed}")
        with told if needed > 1 else nullcontext():
            require_queues(layout, rank, GPU)


# Which ranks share a link

# NUMA node, bridges from the host on, and GPU; domain 0000, function 0. Dumps of NCCL leave out root ports.
DGX_A100 = """
3 01:00 05:00 07:00
3 01:00 0a:00 0d:00 0f:00
1 41:00 47:00
1 41:00 4e:00
7 81:00 87:00
7 81:00 90:00
5 b1:00 b7:00
5 b1:00 bd:00
"""  # github.com/NVIDIA/nccl/issues/1505: NCCL's dump and `nvidia-smi topo -m`; what its excerpts hide is named by us
WORKSTATION = """
0 00:03.1 0a:00
0 00:03.2 0b:00
"""  # github.com/noonghunna/club-3090/issues/845: `lspci -t`, two GPUs on root ports of the CPU
VIRTUAL = """
0 00:1b.0
0 00:1c.0
"""  # github.com/aws/aws-ofi-nccl/issues/466: GPUs of a g5.12xlarge, directly on the root complex


def write_tree(root: Path, tree: str) -> list[str]:
    addresses = []
    (root / "proc/sys/kernel/random").mkdir(parents=True, exist_ok=True)
    (root / "proc/sys/kernel/random/boot_id").write_text("0b5c\n")
    named = root / "sys/bus/pci/devices"
    named.mkdir(parents=True, exist_ok=True)
    for line in tree.strip().splitlines():
        node, *way = line.split()
        full = [f"0000:{each}" if "." in each else f"0000:{each}.0" for each in way]
        device = root.joinpath("sys/devices/pci0000:00", *full)
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
        (named / full[-1]).symlink_to(device)
        addresses.append(full[-1])
    return addresses


@pytest.mark.parametrize(
    ("tree", "links"),
    [
        (DGX_A100, ("pcie0", "pcie0", "pcie1", "pcie1", "pcie2", "pcie2", "pcie3", "pcie3")),
        (WORKSTATION, ()),
        (VIRTUAL, ()),
    ],
)
def test_gpus_below_one_switch_share_its_link(
    tree: str, links: tuple[str | None, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pci, "ROOT", tmp_path)
    places = [pci.read_place(address) for address in write_tree(tmp_path, tree)]
    assert shared_links([places]) == links
    assert [place and place.numa_node for place in places] == [int(line.split()[0]) for line in tree.split("\n")[1:-1]]
    if links:
        assert str(places[0]).endswith(f"reached through 0000:{tree.split()[1]}.0")


def test_what_the_system_does_not_tell_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pci, "ROOT", tmp_path)
    assert pci.read_place("0000:07:00.0") is None, "no sysfs"
    write_tree(tmp_path, "-1 01:00 07:00")
    assert pci.read_place("0000:0f:00.0") is None, "no such GPU"
    assert pci.read_place("") is None, "torch does not tell"
    assert pci.read_place("0000:07:00.0") == Place("0b5c", "0000:07:00.0", "0000:01:00.0", None)


PLACES = st.none() | st.builds(Place, st.sampled_from("AB"), st.just("gpu"), st.sampled_from("xyz"), st.none())


@settings(max_examples=examples(100))
@given(st.integers(1, 6).flatmap(lambda n: st.lists(st.lists(PLACES, min_size=n, max_size=n), min_size=1, max_size=3)))
def test_ranks_share_a_link_if_there_is_a_way_of_shared_ports_between_them(places: list[list[Place | None]]) -> None:
    ranks = range(len(places[0]))
    linked = {(a, b) for row in places for a in ranks for b in ranks if a == b or (row[a] and row[a] == row[b])}
    for _ in ranks:  # its transitive closure
        linked |= {(a, d) for a, b in linked for c, d in linked if b == c}
    links = shared_links(places) or (None,) * len(ranks)
    for a in ranks:
        assert (links[a] is None) == all((a, b) not in linked for b in ranks if a != b)
        assert all((links[a] == links[b]) == ((a, b) in linked) for b in ranks if links[a])
    named = [link for link in dict.fromkeys(links) if link]
    assert named == [f"pcie{number}" for number in range(len(named))]


def test_a_profile_tells_which_ranks_share_a_link_and_auto_schedules_it(ranks: Ranks) -> None:
    ((auto, nothing), _) = ranks(rank_links.profile_on_one_port, links="auto")
    assert (auto, nothing) == (["pcie0", "pcie0"], [])
    ((alone, (told,)), _) = ranks(rank_links.profile_on_one_port, links=None)
    assert alone == [None, None]
    assert told.startswith("ranks 0, 1 share a host link, but not in the problem")
