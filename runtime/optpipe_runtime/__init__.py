"""The runtime: runs OptPipe schedules on torch.distributed, measures models, and swaps better schedules in while a
training runs.

- `pipeline`, `steps`, `service`, `profiles`, `in_torch`, `megatron`: what users call;
- `models`: a model becomes stages;
- `ranks`: the ranks of a pipeline, and how they agree;
- `lowering`: from a schedule to what one rank does;
- `memory`: what a stage keeps, offloads and reloads; `stage`: the ops of one stage; `execute`: one step of a rank;
- `features`: kinds of op that may be left out: evictions, optimizers on the host;
- `swap`: how a better schedule replaces the one that runs;
- `measure`: times and bytes of the user's stages.

Imports go down: pipeline -> features -> swap, measure -> execute -> stage -> memory -> lowering -> ranks.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optpipe_runtime.execute.batch import Microbatches
    from optpipe_runtime.execute.report import Excess, OpTime, StepReport
    from optpipe_runtime.features.host_optimizer import HostOptimizer
    from optpipe_runtime.in_torch import TorchSchedule, name_ranges, record_trace, torch_schedule
    from optpipe_runtime.lowering.plan import Plan
    from optpipe_runtime.lowering.prepare import prepare
    from optpipe_runtime.measure.drift import Profiler
    from optpipe_runtime.models.model import as_whole
    from optpipe_runtime.models.stages import stages_of
    from optpipe_runtime.pipeline import Pipeline
    from optpipe_runtime.profiles import Setup, on_all_ranks, profile_layers
    from optpipe_runtime.ranks.layout import Layout
    from optpipe_runtime.service.client import ScheduleClient
    from optpipe_runtime.service.follow import Follower
    from optpipe_runtime.stage.split import weight_grads
    from optpipe_runtime.steps import PlannedSteps

# The names of each module: imported when first used, so that what needs no torch does not wait for it.
_NAMES = {
    "execute.batch": "Microbatches",
    "execute.report": "Excess OpTime StepReport",
    "features.host_optimizer": "HostOptimizer",
    "in_torch": "TorchSchedule name_ranges record_trace torch_schedule",
    "lowering.plan": "Plan",
    "lowering.prepare": "prepare",
    "measure.drift": "Profiler",
    "models.model": "as_whole",
    "models.stages": "stages_of",
    "pipeline": "Pipeline",
    "profiles": "Setup on_all_ranks profile_layers",
    "ranks.layout": "Layout",
    "service.client": "ScheduleClient",
    "service.follow": "Follower",
    "stage.split": "weight_grads",
    "steps": "PlannedSteps",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = [
    "Excess", "Follower", "HostOptimizer", "Layout", "Microbatches", "OpTime", "Pipeline", "Plan", "PlannedSteps",
    "Profiler", "ScheduleClient", "Setup", "StepReport", "TorchSchedule", "as_whole", "name_ranges", "on_all_ranks",
    "prepare", "profile_layers", "record_trace", "stages_of", "torch_schedule", "weight_grads",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'optpipe_runtime' has no attribute {name!r}")
    return getattr(importlib.import_module(f"optpipe_runtime.{_HOME[name]}"), name)
