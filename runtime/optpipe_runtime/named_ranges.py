"""`name_ranges`: what traces of PyTorch's own pipelining need to be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.pipelining import PipelineStage
from torch.profiler import record_function


def name_ranges(*stages: PipelineStage) -> None:
    """Opens a range such as `PP:0F3` around every forward and backward of these stages, as torch's runtime does.

    `Schedule1F1B` and `ScheduleGPipe` open none: with these `optpipe problem from torch-trace` reads their traces, too.

    Parameters
    ----------
    stages
        Those of this rank, before the steps that are profiled.
    """
    for stage in stages:
        for method, letter in (("forward_one_chunk", "F"), ("backward_one_chunk", "B")):
            if method not in vars(stage):  # not named before
                setattr(stage, method, _named(getattr(stage, method), f"PP:{stage.stage_index}{letter}"))


def _named(run: Callable[..., Any], name: str) -> Callable[..., Any]:
    def run_in_range(microbatch: int, *args: Any, **options: Any) -> Any:
        with record_function(f"{name}{microbatch}"):
            return run(microbatch, *args, **options)

    return run_in_range
