"""The runtime: runs OptPipe schedules on torch.distributed, measures models, and swaps better schedules in while a
training runs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optpipe_runtime.execute.executor import Excess, OpTime, StepReport
    from optpipe_runtime.execute.lowering import Plan, prepare
    from optpipe_runtime.execute.optimizer import HostOptimizer
    from optpipe_runtime.execute.split import register_split, weight_grads
    from optpipe_runtime.factory import Setup
    from optpipe_runtime.follow import Follower
    from optpipe_runtime.measure.drift import Profiler
    from optpipe_runtime.pipeline import Pipeline
    from optpipe_runtime.ranks.layout import Layout

_HOME = {
    "Excess": "execute.executor",
    "Follower": "follow",
    "HostOptimizer": "execute.optimizer",
    "Layout": "ranks.layout",
    "OpTime": "execute.executor",
    "Pipeline": "pipeline",
    "Plan": "execute.lowering",
    "Profiler": "measure.drift",
    "Setup": "factory",
    "StepReport": "execute.executor",
    "prepare": "execute.lowering",
    "register_split": "execute.split",
    "weight_grads": "execute.split",
}
__all__ = [
    "Excess",
    "Follower",
    "HostOptimizer",
    "Layout",
    "OpTime",
    "Pipeline",
    "Plan",
    "Profiler",
    "Setup",
    "StepReport",
    "prepare",
    "register_split",
    "weight_grads",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'optpipe_runtime' has no attribute {name!r}")
    return getattr(importlib.import_module(f"optpipe_runtime.{_HOME[name]}"), name)
