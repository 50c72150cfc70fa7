"""Which GPUs share a host link, as sysfs tells it on machines whose trees others have published. The trees are written
here as files; nothing was measured on these machines."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.ranks import links as rank_links
from support.ranks.worker import Ranks

from optpipe_runtime.memory import pci
from optpipe_runtime.memory.pci import Place, shared_links

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
    """Writes what sysfs has of these GPUs below `root`; returns their addresses."""
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
