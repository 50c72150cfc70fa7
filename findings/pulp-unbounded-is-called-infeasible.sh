#!/usr/bin/env bash
# PuLP 3.3.2: a feasible model without a finite optimum is called Infeasible with HiGHS (highspy 1.15.1) if it has an integer
# variable, and with GUROBI (gurobipy 13.0.3) if it has none. CBC calls both Unbounded. Both solvers had said "unbounded or
# infeasible", which PuLP takes for infeasible.
#
# Expected: Unbounded, or Undefined as nothing is proven. Seen: a forgotten limit looks like constraints that exclude each
# other, and who relaxes constraints until a model is feasible never ends.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check pulp==3.3.2 highspy==1.15.1 gurobipy==13.0.3
env -u GRB_LICENSE_FILE HOME="$folder" "$folder/venv/bin/python" - <<'PYTHON' | grep -v '^Restricted' | tee "$folder/seen"
import pulp

for category in "Continuous", "Integer":
    for solver in pulp.HiGHS(msg=False), pulp.GUROBI(msg=False), pulp.PULP_CBC_CMD(msg=False):
        problem = pulp.LpProblem("unbounded", pulp.LpMaximize)
        x = pulp.LpVariable("x", 0, cat=category)
        problem += x
        problem += x >= 2
        problem.solve(solver)
        print(f"{category}, {solver.name}: {pulp.LpStatus[problem.status]}, {pulp.LpSolution[problem.sol_status]}")
PYTHON
diff - "$folder/seen" <<'SEEN'
Continuous, HiGHS: Unbounded, Solution is Unbounded
Continuous, GUROBI: Infeasible, No Solution Exists
Continuous, PULP_CBC_CMD: Unbounded, Solution is Unbounded
Integer, HiGHS: Infeasible, No Solution Exists
Integer, GUROBI: Unbounded, Solution is Unbounded
Integer, PULP_CBC_CMD: Unbounded, Solution is Unbounded
SEEN
echo "as stated"
