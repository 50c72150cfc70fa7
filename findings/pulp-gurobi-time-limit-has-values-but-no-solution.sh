#!/usr/bin/env bash
# PuLP 3.3.2, solver GUROBI (gurobipy 13.0.3): when time is up and Gurobi has a solution, PuLP says "Not Solved" and "No
# Solution Exists", although it has set every variable to that solution. With HiGHS and CBC the same model ends as "Optimal"
# with sol_status "Solution Found".
#
# Expected: one status for one situation, whatever the solver. Seen: who goes by the status drops Gurobi's incumbent.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check pulp==3.3.2 gurobipy==13.0.3 highspy==1.15.1
env -u GRB_LICENSE_FILE HOME="$folder" "$folder/venv/bin/python" - <<'PYTHON' | grep -v '^Restricted' | tee "$folder/seen"
import random

import pulp


def knapsacks():
    """300 items, 100 limits: none of the three solvers proves an optimum in 3 s."""
    draw = random.Random(0)
    problem = pulp.LpProblem("knapsacks", pulp.LpMaximize)
    x = [pulp.LpVariable(f"x{i}", cat="Binary") for i in range(300)]
    problem += pulp.lpSum(draw.randint(50, 100) * v for v in x)
    for _ in range(100):
        problem += pulp.lpSum(draw.randint(1, 60) * v for v in x) <= 3000
    return problem


for solver in pulp.GUROBI(msg=False, timeLimit=3), pulp.HiGHS(msg=False, timeLimit=3), pulp.PULP_CBC_CMD(msg=False, timeLimit=3):
    problem = knapsacks()
    status = problem.solve(solver)
    values = [v.value() for v in problem.variables()]
    feasible = None not in values and problem.valid(1e-6)
    print(f"{solver.name}: {pulp.LpStatus[status]}, {pulp.LpSolution[problem.sol_status]}, a feasible solution in the variables: {feasible}")
PYTHON
diff - "$folder/seen" <<'SEEN'
GUROBI: Not Solved, No Solution Exists, a feasible solution in the variables: True
HiGHS: Optimal, Solution Found, a feasible solution in the variables: True
PULP_CBC_CMD: Optimal, Solution Found, a feasible solution in the variables: True
SEEN
echo "as stated"
