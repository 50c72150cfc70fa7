#!/usr/bin/env bash
# OR-Tools 9.15.6755, CP-SAT: enumerate_all_solutions with more than one worker ends as OPTIMAL without having found all
# solutions. Of the 24 orders of four jobs the callback sees 8. One worker finds 24, and so do two with symmetry_level = 0.
#
# Expected: all solutions, some of them several times, as the parameter's comment says of more workers. Seen: a model with a
# symmetry loses most of its solutions, with the status that says that the enumeration is complete. The default number of
# workers is safe, a script that sets num_workers is not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check ortools==9.15.6755
"$folder/venv/bin/python" - <<'PYTHON' | tee "$folder/seen"
from ortools.sat.python import cp_model


class Seen(cp_model.CpSolverSolutionCallback):
    def __init__(self, variables):
        super().__init__()
        self.variables, self.points = variables, set()

    def on_solution_callback(self):
        self.points.add(tuple(self.value(x) for x in self.variables))


for parameters in {}, {"num_workers": 1}, {"num_workers": 2}, {"num_workers": 8}, {"num_workers": 2, "symmetry_level": 0}:
    model, solver = cp_model.CpModel(), cp_model.CpSolver()
    position = [model.new_int_var(0, 3, f"position{i}") for i in range(4)]
    model.add_all_different(position)
    solver.parameters.enumerate_all_solutions = True
    for name, value in parameters.items():
        setattr(solver.parameters, name, value)
    seen = Seen(position)
    status = solver.status_name(solver.solve(model, seen))
    print(parameters or "default", status, f"{len(seen.points)} of 24 orders")
PYTHON
diff - "$folder/seen" <<'SEEN'
default OPTIMAL 24 of 24 orders
{'num_workers': 1} OPTIMAL 24 of 24 orders
{'num_workers': 2} OPTIMAL 8 of 24 orders
{'num_workers': 8} OPTIMAL 8 of 24 orders
{'num_workers': 2, 'symmetry_level': 0} OPTIMAL 24 of 24 orders
SEEN
echo "as stated"
