#!/usr/bin/env bash
# OR-Tools 9.15.6755, CP-SAT: sufficient_assumptions_for_infeasibility names the two assumptions that exclude each other,
# until the model has an objective. Then it names all assumptions, also those that are in no constraint.
#
# Expected: the same two, as an objective does not make a model infeasible, or an error. Seen: a list that says nothing, with one
# worker and with eight. Who asks why a scheduling model is infeasible must solve it again without its objective.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check ortools==9.15.6755
"$folder/venv/bin/python" - <<'PYTHON' | tee "$folder/seen"
from ortools.sat.python import cp_model

for objective in False, True:
    for workers in 1, 8:
        model = cp_model.CpModel()
        assumed = [model.new_bool_var(f"assumption {i}") for i in range(6)]
        x, y = model.new_int_var(0, 10, "x"), model.new_int_var(0, 10, "y")
        model.add(x + y <= 5).only_enforce_if(assumed[1])
        model.add(2 * x + y >= 16).only_enforce_if(assumed[3])
        model.add(x + y >= 1).only_enforce_if(assumed[4])
        model.add_assumptions(assumed)
        if objective:
            model.minimize(x)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = workers
        status = solver.status_name(solver.solve(model))
        named = sorted(solver.sufficient_assumptions_for_infeasibility())
        print(f"{'with' if objective else 'without'} an objective, {workers} workers: {status}, assumptions", *named)
PYTHON
diff - "$folder/seen" <<'SEEN'
without an objective, 1 workers: INFEASIBLE, assumptions 1 3
without an objective, 8 workers: INFEASIBLE, assumptions 1 3
with an objective, 1 workers: INFEASIBLE, assumptions 0 1 2 3 4 5
with an objective, 8 workers: INFEASIBLE, assumptions 0 1 2 3 4 5
SEEN
echo "as stated"
