"""OptPipe: schedules for pipeline-parallel training that are as short as possible and never need more memory than there
is.

problem = optpipe.Problem.load("problem.json")
result = optpipe.solve(problem, time_limit_s=20)
print(result.makespan_ms, result.gap)
result.schedule.save("schedule.json")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optpipe.anytime import improve, solve
    from optpipe.comparison import Comparison, compare
    from optpipe.errors import InputError, OptPipeError, ScheduleError, SolverError
    from optpipe.evaluate.deadlock import DeadlockError
    from optpipe.evaluate.memory import Certificate
    from optpipe.evaluate.timeline import Timeline
    from optpipe.formats.convert import export_schedule, import_schedule, leave_out_offload
    from optpipe.measured.convert import problem_from
    from optpipe.measured.estimate import Measurements
    from optpipe.model.offload import estimated_offload_ratio, offload_ratio
    from optpipe.model.ops import Kind, Op, Pair
    from optpipe.model.problem import Problem
    from optpipe.model.program import Program
    from optpipe.model.records import Device, Stage
    from optpipe.results import Result
    from optpipe.schedule import Schedule, ScheduleFile, certify, check, simulate

# Each name with its module: imported when first used, so that `optpipe --help` does not wait for numpy.
_HOME = {
    "Certificate": "evaluate.memory",
    "Comparison": "comparison",
    "DeadlockError": "evaluate.deadlock",
    "Device": "model.records",
    "InputError": "errors",
    "Kind": "model.ops",
    "Measurements": "measured.estimate",
    "Op": "model.ops",
    "OptPipeError": "errors",
    "Pair": "model.ops",
    "Problem": "model.problem",
    "Program": "model.program",
    "Result": "results",
    "Schedule": "schedule",
    "ScheduleError": "errors",
    "ScheduleFile": "schedule",
    "SolverError": "errors",
    "Stage": "model.records",
    "Timeline": "evaluate.timeline",
    "certify": "schedule",
    "check": "schedule",
    "compare": "comparison",
    "estimated_offload_ratio": "model.offload",
    "export_schedule": "formats.convert",
    "import_schedule": "formats.convert",
    "improve": "anytime",
    "leave_out_offload": "formats.convert",
    "offload_ratio": "model.offload",
    "problem_from": "measured.convert",
    "simulate": "schedule",
    "solve": "anytime",
}
__all__ = [
    "Certificate",
    "Comparison",
    "DeadlockError",
    "Device",
    "InputError",
    "Kind",
    "Measurements",
    "Op",
    "OptPipeError",
    "Pair",
    "Problem",
    "Program",
    "Result",
    "Schedule",
    "ScheduleError",
    "ScheduleFile",
    "SolverError",
    "Stage",
    "Timeline",
    "certify",
    "check",
    "compare",
    "estimated_offload_ratio",
    "export_schedule",
    "import_schedule",
    "improve",
    "leave_out_offload",
    "offload_ratio",
    "problem_from",
    "simulate",
    "solve",
]
__version__ = "0.1.0"


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'optpipe' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"optpipe.{_HOME[name]}"), name)
    globals()[name] = value
    return value
