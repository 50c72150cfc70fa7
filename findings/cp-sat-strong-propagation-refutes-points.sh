#!/usr/bin/env bash
# OR-Tools 9.15.6755, CP-SAT: with use_strong_propagation_in_disjunctive, a feasible no-overlap model with intervals of size
# 0 at the border of another interval is called INFEASIBLE. The default parameters call the same model OPTIMAL.
#
# Expected: stronger propagation changes the time, not the status. Seen: it changes the status, with one worker, without a warning.
# A refutation by it is no proof where a model has intervals of size 0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check ortools==9.15.6755
"$folder/venv/bin/python" - <<'PYTHON' | tee "$folder/seen"
from ortools.sat.python import cp_model

SIZES, HORIZON = (0, 2, 0, 0), 2  # a point at 0, an op on [0, 2), two points at 2: nothing overlaps
for strong in (False, True):
    model = cp_model.CpModel()
    start = [model.new_int_var(0, HORIZON - size, "") for size in SIZES]
    model.add_no_overlap(model.new_fixed_size_interval_var(s, size, "") for s, size in zip(start, SIZES))
    model.add(start[1] >= start[0])
    model.add(start[2] >= start[0] + 1)
    model.add(start[3] >= start[0] + 1)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.use_strong_propagation_in_disjunctive = strong
    status = solver.solve(model)
    print(f"strong={strong}: {solver.status_name(status)}", [solver.value(s) for s in start] if status == cp_model.OPTIMAL else "")
PYTHON
diff - "$folder/seen" <<'SEEN'
strong=False: OPTIMAL [0, 0, 2, 2]
strong=True: INFEASIBLE 
SEEN
echo "as stated"
