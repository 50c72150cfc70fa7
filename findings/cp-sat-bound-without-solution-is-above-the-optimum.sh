#!/usr/bin/env bash
# OR-Tools 9.15.6755, CP-SAT: a minimization that ends as UNKNOWN before its first bound has best_objective_bound 0 and
# objective_value 0, also where every feasible value is below 0. Here the optimum is -3,220: 0 is no lower bound.
#
# Expected: minus infinity, or an error, as no bound was proven. Seen: a number that looks like one, and is above the optimum.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check ortools==9.15.6755
"$folder/venv/bin/python" - <<'PYTHON' | tee "$folder/seen"
from ortools.sat.python import cp_model

model = cp_model.CpModel()
x = [model.new_int_var(-100, -50, "") for _ in range(40)]
model.add_all_different(x)
model.minimize(sum(x))
for limit in {"max_deterministic_time": 0.0}, {}:
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    for name, value in limit.items():
        setattr(solver.parameters, name, value)
    status = solver.status_name(solver.solve(model))
    print(f"{limit or 'no limit'}: {status}, value {solver.objective_value:g}, bound {solver.best_objective_bound:g}")
PYTHON
diff - "$folder/seen" <<'SEEN'
{'max_deterministic_time': 0.0}: UNKNOWN, value 0, bound 0
no limit: OPTIMAL, value -3220, bound -3220
SEEN
echo "as stated"
