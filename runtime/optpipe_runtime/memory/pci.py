"""Where a GPU is in its machine, as the system reports it: its NUMA node, and the link over which it reaches the host.

All of it stands in sysfs, from which nvidia-smi and NCCL read the same tree. A virtual machine may show another tree
than the hardware's, and what it hides cannot be found.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path("/")
ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")  # such as 0000:3b:00.0


class Place(NamedTuple):
    machine: str  # until it starts again
    address: str  # the GPU's on PCI, such as 0000:3b:00.0
    # The PCI address of the first bridge on the way from the host, all GPUs below which share its link to the host. The
    # GPU's own if there is no bridge.
    port: str
    numa_node: int | None  # None if the system does not report it

    def __str__(self) -> str:
        node = "" if self.numa_node is None else f", NUMA node {self.numa_node}"
        return f"GPU {self.address}{node}, reached through {self.port}"


def place(device: torch.device) -> Place | None:
    """Where a device is; None for a CPU, and where neither the system nor torch reports it."""
    return read_place(address(device)) if device.type == "cuda" else None


def read_place(address: str) -> Place | None:
    """Where the GPU of a PCI address is; None if the system does not report it."""
    try:
        machine = (ROOT / "proc/sys/kernel/random/boot_id").read_text().strip()
        path = (ROOT / "sys/bus/pci/devices" / address).resolve(strict=True)
    except OSError:
        return None
    below_host = [part for part in path.parts if ADDRESS.fullmatch(part)]
    return Place(machine, address, below_host[0], numa_node(address)) if below_host else None


def address(device: torch.device) -> str:
    """The PCI address of a GPU; empty if this torch does not report it."""
    properties: Any = torch.cuda.get_device_properties(device)
    domain, bus, slot = (getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device"))
    return "" if domain is None else f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def numa_node(address: str) -> int | None:
    """The NUMA node of a PCI device; None if the system does not report it."""
    try:
        node = int((ROOT / "sys/bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def cpus_near(address: str) -> set[int]:
    """The CPUs of the NUMA node of a PCI device. Empty if the system does not report it."""
    try:
        ranges = (ROOT / f"sys/devices/system/node/node{numa_node(address)}/cpulist").read_text().split(",")
        bounds = [[int(bound) for bound in text.split("-")] for text in ranges if text.strip()]
    except (OSError, ValueError):
        return set()
    return {cpu for first, *last in bounds for cpu in range(first, (last or [first])[0] + 1)}


def shared_links(places: Sequence[Sequence[Place | None]]) -> tuple[str | None, ...]:
    """For each rank the host link that it shares with others, as `Pipeline` takes them: pcie0, pcie1, ... by the lowest
    rank; None if it shares none. Empty if no rank does. `places` are those of the ranks, for each inner peer: ranks
    share a link if any of their peers do."""
    group = list(range(len(places[0])))  # the lowest rank that a rank is linked with
    for by_rank in places:
        first: dict[tuple[str, str], int] = {}
        for rank, each in enumerate(by_rank):
            if each is not None:
                before = group[first.setdefault((each.machine, each.port), rank)]
                low, high = sorted((before, group[rank]))
                group = [low if other == high else other for other in group]
    shared = [lowest for lowest in dict.fromkeys(group) if group.count(lowest) > 1]
    names = {lowest: f"pcie{number}" for number, lowest in enumerate(shared)}
    return tuple(names.get(lowest) for lowest in group) if names else ()
