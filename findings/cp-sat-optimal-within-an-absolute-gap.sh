#!/usr/bin/env bash
# OR-Tools 9.15.6755, CP-SAT: the status OPTIMAL depends on the unit of the objective. The same job shop, its times in
# microseconds, ends with makespan 119 where the makespan is minimized, and with 136 where 1e-6 times the makespan is, the
# same in seconds. Both say OPTIMAL; the bound that comes with the second one is 102.
#
# Expected: all variables are integers and an objective is scaled to integers, so OPTIMAL is the optimum, or the status is FEASIBLE.
# Seen: whatever is within 0.0001 of the bound is OPTIMAL, here a schedule 14 % too long.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check ortools==9.15.6755
"$folder/venv/bin/python" - <<'PYTHON' | tee "$folder/seen"
import random

from ortools.sat.python import cp_model


def job_shop():
    """8 jobs on 6 machines, times in microseconds, and its makespan."""
    draw, model, horizon = random.Random(1), cp_model.CpModel(), 8 * 6 * 20
    makespan, on = model.new_int_var(0, horizon, ""), [[] for _ in range(6)]
    for _ in range(8):
        end = 0
        for machine in draw.sample(range(6), 6):
            size, start = draw.randint(1, 20), model.new_int_var(0, horizon, "")
            model.add(start >= end)
            on[machine].append(model.new_fixed_size_interval_var(start, size, ""))
            end = start + size
        model.add(makespan >= end)
    for intervals in on:
        model.add_no_overlap(intervals)
    return model, makespan


for unit in 1, 1e-6:
    model, makespan = job_shop()
    model.minimize(makespan if unit == 1 else unit * makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    status = solver.status_name(solver.solve(model))
    bound = solver.best_objective_bound / unit
    print(f"objective {unit:g} x makespan: {status}, makespan {solver.value(makespan)}, bound {bound:.0f}")
PYTHON
diff - "$folder/seen" <<'SEEN'
objective 1 x makespan: OPTIMAL, makespan 119, bound 119
objective 1e-06 x makespan: OPTIMAL, makespan 136, bound 102
SEEN
echo "as stated"
