"""What a program that measures under torchrun does on each rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def measure_on_ranks(measure: Callable[[], Any], answer: Path) -> None:
    """Calls `measure` on every rank, one thread each, and writes what rank 0 returns to `answer`, as JSON."""
    torch.set_num_threads(1)  # ranks share the cores
    dist.init_process_group("gloo")
    measured = measure()
    if dist.get_rank() == 0:
        answer.write_text(json.dumps(measured))
    dist.destroy_process_group()
