"""torch.distributed with one rank, for benchmarks that need no other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from optpipe.errors import InputError


@contextmanager
def single_rank(what: str) -> Iterator[None]:
    """In this context torch.distributed has this process as its only rank. Raises `InputError` if the process has
    process groups already."""
    if dist.is_initialized():
        raise InputError(f"{what} needs a process in which torch.distributed is not initialized")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # there is no other rank
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()
