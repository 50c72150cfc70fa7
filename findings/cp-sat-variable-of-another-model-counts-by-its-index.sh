#!/usr/bin/env bash
# OR-Tools 9.15.6755, CP-SAT: a variable of one model in a constraint of another one is taken for the variable with the same
# index there. No call raises, and value() then returns the other variable's value under the first one's name.
#
# Expected: an error. Seen: where several models are built, as for subproblems of a large neighbourhood search, a variable of
# the wrong model gives a valid model with another meaning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check ortools==9.15.6755
"$folder/venv/bin/python" - <<'PYTHON' | tee "$folder/seen"
from ortools.sat.python import cp_model

plan = cp_model.CpModel()
start = plan.new_int_var(0, 100, "start")
part = cp_model.CpModel()
workers = part.new_int_var(0, 7, "workers")
cost = part.new_int_var(0, 1000, "cost")
part.add(cost == 10 * workers)
part.add(start >= 5)  # start is no variable of part
part.minimize(cost)
solver = cp_model.CpSolver()
solver.parameters.num_workers = 1
print("validate:", repr(part.validate()), solver.status_name(solver.solve(part)))
print("workers", solver.value(workers), "cost", solver.value(cost), "start", solver.value(start))
PYTHON
diff - "$folder/seen" <<'SEEN'
validate: '' OPTIMAL
workers 5 cost 50 start 5
SEEN
echo "as stated"
