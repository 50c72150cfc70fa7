#!/usr/bin/env bash
# OR-Tools 9.15.6755, CP-SAT: add_no_overlap and add_cumulative with capacity 1 and demands 1 differ for intervals of size 0.
# A point inside another interval violates the first and not the second; in a cumulative a point may even ask for more than
# the capacity.
#
# Expected: one machine is a cumulative resource of capacity 1, so both have the same solutions. Seen: they have not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check ortools==9.15.6755
"$folder/venv/bin/python" - <<'PYTHON' | tee "$folder/seen"
from ortools.sat.python import cp_model

for name, at, demand in ("no overlap", 1, None), ("cumulative", 1, 1), ("cumulative", 1, 5), ("no overlap", 2, None):
    model = cp_model.CpModel()
    intervals = [model.new_fixed_size_interval_var(at, 0, "point"), model.new_fixed_size_interval_var(0, 2, "op")]
    if demand is None:
        model.add_no_overlap(intervals)
    else:
        model.add_cumulative(intervals, [demand, 1], 1)
    solver = cp_model.CpSolver()
    demands = f", demand {demand} of 1" if demand else ""
    print(f"{name}{demands}, a point at {at} and an op on [0, 2): {solver.status_name(solver.solve(model))}")
PYTHON
diff - "$folder/seen" <<'SEEN'
no overlap, a point at 1 and an op on [0, 2): INFEASIBLE
cumulative, demand 1 of 1, a point at 1 and an op on [0, 2): OPTIMAL
cumulative, demand 5 of 1, a point at 1 and an op on [0, 2): OPTIMAL
no overlap, a point at 2 and an op on [0, 2): OPTIMAL
SEEN
echo "as stated"
