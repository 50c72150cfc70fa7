"""Programs that measure under torchrun: what they do on each rank, and the files by which they are asked and answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from pydantic_core import to_json

from optpipe.schedule import Schedule, ScheduleFile

T = TypeVar("T")


def save(record: Any, path: Path) -> None:
    """Write a dataclass, or a list of them, as JSON."""
    path.write_bytes(to_json(record))


def load(kind: type[T], path: Path) -> T:
    """Read what `save` wrote."""
    return TypeAdapter(kind).validate_json(path.read_bytes())


def schedule_file(schedule: Schedule) -> dict[str, Any]:
    """A schedule as such a record has it."""
    content: dict[str, Any] = json.loads(ScheduleFile.from_schedule(schedule).to_json())
    return content


def measure_on_ranks(measure: Callable[[], Any], answer: Path) -> None:
    """Call `measure` on every rank, one thread each, and save what rank 0 returns to `answer`."""
    torch.set_num_threads(1)  # ranks share the cores
    dist.init_process_group("gloo")
    measured = measure()
    if dist.get_rank() == 0:
        save(measured, answer)
    dist.destroy_process_group()
