#!/usr/bin/env bash
# OR-Tools 9.15.6755, CP-SAT: a complete and feasible hint is no incumbent. If the limit ends the solve before the search has
# begun, the status is UNKNOWN, and no callback has seen a solution; with more time the first solution is the hint itself.
#
# Expected: FEASIBLE with the hint, as a MIP start gives in HiGHS. Seen: who passes a warm start must keep it himself.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check ortools==9.15.6755
"$folder/venv/bin/python" - <<'PYTHON' | tee "$folder/seen"
import random

from ortools.sat.python import cp_model

JOBS, MACHINES = 20, 10


def job_shop():
    """A job shop with the start times of a list schedule as its hint, and the hint's makespan."""
    draw, model = random.Random(1), cp_model.CpModel()
    ms = [[draw.randint(1, 20) for _ in range(MACHINES)] for _ in range(JOBS)]
    order = [draw.sample(range(MACHINES), MACHINES) for _ in range(JOBS)]
    horizon, on = sum(map(sum, ms)), [[] for _ in range(MACHINES)]
    makespan, job_end, machine_end = model.new_int_var(0, horizon, ""), [0] * JOBS, [0] * MACHINES
    start = [[model.new_int_var(0, horizon, "") for _ in range(MACHINES)] for _ in range(JOBS)]
    for k in range(MACHINES):
        for i in range(JOBS):
            machine, size = order[i][k], ms[i][k]
            on[machine].append(model.new_fixed_size_interval_var(start[i][k], size, ""))
            if k:
                model.add(start[i][k] >= start[i][k - 1] + ms[i][k - 1])
            model.add(makespan >= start[i][k] + size)
            at = max(job_end[i], machine_end[machine])
            job_end[i] = machine_end[machine] = at + size
            model.add_hint(start[i][k], at)
    for intervals in on:
        model.add_no_overlap(intervals)
    model.add_hint(makespan, max(job_end))
    model.minimize(makespan)
    return model, max(job_end)


class First(cp_model.CpSolverSolutionCallback):
    value = None

    def on_solution_callback(self):
        self.value = self.value or int(self.objective_value)


for limit in 1e-9, 2.0:
    model, hinted = job_shop()
    solver, first = cp_model.CpSolver(), First()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = limit
    status = solver.status_name(solver.solve(model, first))
    print(f"deterministic time {limit:g}: hint {hinted}, {status}, first solution {first.value}")
PYTHON
diff - "$folder/seen" <<'SEEN'
deterministic time 1e-09: hint 313, UNKNOWN, first solution None
deterministic time 2: hint 313, OPTIMAL, first solution 313
SEEN
echo "as stated"
