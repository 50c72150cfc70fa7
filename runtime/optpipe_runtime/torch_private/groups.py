"""Private names of torch.distributed and DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.distributed_c10d import _world
from torch.nn.parallel import DistributedDataParallel


def described_groups() -> list[tuple[str, list[int]]]:
    """Every group of this rank: what it is for, such as mesh_tp of a DeviceMesh, and its ranks."""
    return [(group.group_desc, get_process_group_ranks(group)) for group in _world.pg_map]


def timeouts(group: ProcessGroup) -> Iterator[timedelta]:
    """The timeouts that the user gave to a group, one of each device's backend. No public name of torch has them."""
    for device in group._device_types:
        with suppress(RuntimeError):  # a backend without options
            yield group._get_backend(device).options._timeout


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Of a group with options of its own, where `new_group` leaves its argument out."""
    options._timeout = timeout


def delayed_parameters(wrapper: DistributedDataParallel) -> Any:
    """The option `delay_all_reduce_named_params`, which is refused; torch keeps it under this name only."""
    return wrapper._delay_all_reduce_params
