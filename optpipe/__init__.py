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
    from optpipe.evaluate.effects import Certificate
    from optpipe.evaluate.timeline import DeadlockError, Timeline
    from optpipe.formats import export_schedule, import_schedule, leave_out_offload
    from optpipe.formats.torch_memory import as_torch_holds, whole_backwards
    from optpipe.lift import with_host_updates
    from optpipe.measured.convert import problem_from
    from optpipe.measured.estimate import Measurements
    from optpipe.model.ops import Kind, Op, Pair
    from optpipe.model.problem import Problem, offload_ratio
    from optpipe.model.program import Program
    from optpipe.model.records import Device, Stage
    from optpipe.results import Result
    from optpipe.schedule import Schedule, ScheduleFile, certify, check, simulate
    from optpipe.show.page import plot

# The names of each module: imported when first used, so that `optpipe --help` does not wait for numpy.
_NAMES = {
    "anytime": "improve solve",
    "comparison": "Comparison compare",
    "errors": "InputError OptPipeError ScheduleError SolverError",
    "evaluate.effects": "Certificate",
    "evaluate.timeline": "DeadlockError Timeline",
    "formats": "export_schedule import_schedule leave_out_offload",
    "formats.torch_memory": "as_torch_holds whole_backwards",
    "lift": "with_host_updates",
    "measured.convert": "problem_from",
    "measured.estimate": "Measurements",
    "model.ops": "Kind Op Pair",
    "model.problem": "Problem offload_ratio",
    "model.program": "Program",
    "model.records": "Device Stage",
    "results": "Result",
    "schedule": "Schedule ScheduleFile certify check simulate",
    "show.page": "plot",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = [
    "Certificate", "Comparison", "DeadlockError", "Device", "InputError", "Kind", "Measurements", "Op",
    "OptPipeError", "Pair", "Problem", "Program", "Result", "Schedule", "ScheduleError", "ScheduleFile",
    "SolverError", "Stage", "Timeline", "as_torch_holds", "certify", "check", "compare", "export_schedule",
    "import_schedule", "improve", "leave_out_offload", "offload_ratio", "plot", "problem_from", "simulate", "solve",
    "whole_backwards", "with_host_updates",
]  # fmt: skip
__version__ = "0.1.0"


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'optpipe' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"optpipe.{_HOME[name]}"), name)
    globals()[name] = value
    return value
