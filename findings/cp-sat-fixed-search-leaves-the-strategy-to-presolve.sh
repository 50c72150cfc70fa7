#!/usr/bin/env bash
# OR-Tools 9.15.6755, CP-SAT: with FIXED_SEARCH and one worker, the strategy CHOOSE_FIRST with the smallest value and the one
# with the largest value end in the same solution, which neither of them would reach: presolve decides. Without presolve, or
# with keep_all_feasible_solutions_in_presolve, each of them is followed.
#
# Expected: the first solution of a fixed search is the one that the strategy leads to. Seen: who writes a list schedule or a
# lexicographic rule as a decision strategy gets another solution, of a model with one constraint.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check ortools==9.15.6755
"$folder/venv/bin/python" - <<'PYTHON' | tee "$folder/seen"
from ortools.sat.python import cp_model

for parameters in {}, {"keep_all_feasible_solutions_in_presolve": True}, {"cp_model_presolve": False}:
    for value in "SELECT_MIN_VALUE", "SELECT_MAX_VALUE":
        model, solver = cp_model.CpModel(), cp_model.CpSolver()
        x = [model.new_int_var(0, 5, f"x{i}") for i in range(3)]
        model.add(sum(x) >= 7)
        model.add_decision_strategy(x, cp_model.CHOOSE_FIRST, getattr(cp_model, value))
        solver.parameters.num_workers = 1
        solver.parameters.search_branching = cp_model.FIXED_SEARCH
        for name, setting in parameters.items():
            setattr(solver.parameters, name, setting)
        solver.solve(model)
        print(parameters or "default", value, [solver.value(v) for v in x])
PYTHON
diff - "$folder/seen" <<'SEEN'
default SELECT_MIN_VALUE [5, 2, 0]
default SELECT_MAX_VALUE [5, 2, 0]
{'keep_all_feasible_solutions_in_presolve': True} SELECT_MIN_VALUE [0, 2, 5]
{'keep_all_feasible_solutions_in_presolve': True} SELECT_MAX_VALUE [5, 5, 5]
{'cp_model_presolve': False} SELECT_MIN_VALUE [0, 2, 5]
{'cp_model_presolve': False} SELECT_MAX_VALUE [5, 5, 5]
SEEN
echo "as stated"
