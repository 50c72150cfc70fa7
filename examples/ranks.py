"""Starts ranks on this machine, one process and one thread each."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

T = TypeVar("T")


def on_ranks(ranks: int, run: Callable[..., T], *arguments: Any) -> T:
    """Calls `run` on so many ranks over gloo, as torchrun would start them; returns what it returns on rank 0."""
    os.environ["OMP_NUM_THREADS"] = "1"  # ranks share the cores
    config = LaunchConfig(1, 1, ranks, run_id="here", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0)
    returned: dict[int, T] = elastic_launch(config, _on_rank)(run, arguments)
    return returned[0]


def _on_rank(run: Callable[..., T], arguments: tuple[Any, ...]) -> T:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    returned = run(*arguments)
    dist.destroy_process_group()
    return returned
