"""Compiles the search loops before the tests start, or each process that runs tests would do it by itself."""

from pathlib import Path

from optpipe import Problem
from optpipe.dispatch.descents import compile_descents
from optpipe.dispatch.simulate import Simulator
from optpipe.model.records import OFFLOAD, RECOMPUTE
from optpipe.steps import assign
from optpipe_solver.relax import device_bounds, searchable_devices

PROBLEMS = Path(__file__).parents[2] / "examples" / "problems"


def main() -> None:
    one_stage, several_stages = (Problem.load(PROBLEMS / f"{name}.json") for name in ("fastlink-4x8", "vshape-4x8"))
    compile_descents(Simulator(one_stage))
    assign(one_stage, 1)
    stays: dict[str, None] = dict.fromkeys(OFFLOAD + RECOMPUTE)
    all_stay = several_stages.replace(stages=[stage.model_copy(update=stays) for stage in several_stages.stages])
    for problem in (one_stage, all_stay):
        next(device_bounds(problem, searchable_devices(problem)[0], "makespan"), None)


if __name__ == "__main__":
    main()
