"""The runtime: runs OptPipe schedules on torch.distributed, measures models, and swaps better schedules in while a training runs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optpipe_runtime.drift import Profiler
    from optpipe_runtime.executor import Excess, OpTime, StepReport
    from optpipe_runtime.factory import Setup
    from optpipe_runtime.follow import Follower
    from optpipe_runtime.layout import Layout
    from optpipe_runtime.lowering import Plan, prepare
    from optpipe_runtime.optimizer import HostOptimizer
    from optpipe_runtime.pipeline import Pipeline
    from optpipe_runtime.split import register_split, weight_grads

_HOME = {
    "Excess": "executor",
    "Follower": "follow",
    "HostOptimizer": "optimizer",
    "Layout": "layout",
    "OpTime": "executor",
    "Pipeline": "pipeline",
    "Plan": "lowering",
    "Profiler": "drift",
    "Setup": "factory",
    "StepReport": "executor",
    "prepare": "lowering",
    "register_split": "split",
    "weight_grads": "split",
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
