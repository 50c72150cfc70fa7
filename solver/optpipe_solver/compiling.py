"""`python -m optpipe_solver.compiling`: compiles the loops of searches and of first schedules, once on a machine."""

from __future__ import annotations

from optpipe.dispatch.descents import compile_descents
from optpipe.dispatch.simulate import Simulator
from optpipe.evaluate.jit import compile_at_once
from optpipe.model.records import OFFLOAD
from optpipe.schedule import check
from optpipe_solver.anneal import Annealing
from optpipe_solver.engines import small_problem
from optpipe_solver.relax import device_bounds, searchable_devices
from optpipe_solver.systems import generate


def main() -> None:
    compile_at_once(for_all=True)
    problem = small_problem()
    check(problem, generate("1f1b", problem))
    stays = problem.stages[0].model_copy(update=dict.fromkeys(OFFLOAD))
    chunks = problem.replace(stages=[stays.model_copy(update={"device": s % 2}) for s in range(4)])
    for each in (problem, chunks):
        next(device_bounds(each, searchable_devices(each)[0]), None)
    Annealing(generate("1f1b", problem), "makespan", 0)
    compile_descents(Simulator(problem))  # last: whoever finds these compiled takes the others to be


if __name__ == "__main__":
    main()
