#!/usr/bin/env bash
# PuLP 3.3.2: timeLimit=0 ends HiGHS at once, with GUROBI (gurobipy 13.0.3) it is no limit at all; timeLimit=0.001 is one for
# both. Who passes what is left of a budget waits for Gurobi as long as it takes.
#
# Expected: 0 s means the same for all solvers. Seen: the optimum with GUROBI, no solution with HiGHS.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check pulp==3.3.2 gurobipy==13.0.3 highspy==1.15.1
env -u GRB_LICENSE_FILE HOME="$folder" "$folder/venv/bin/python" - <<'PYTHON' | grep -v '^Restricted' | tee "$folder/seen"
import random

import pulp


def knapsacks():
    """40 items, 10 limits: some seconds until the optimum."""
    draw = random.Random(0)
    problem = pulp.LpProblem("knapsacks", pulp.LpMaximize)
    x = [pulp.LpVariable(f"x{i}", cat="Binary") for i in range(40)]
    problem += pulp.lpSum(draw.randint(50, 100) * v for v in x)
    for _ in range(10):
        problem += pulp.lpSum(draw.randint(1, 60) * v for v in x) <= 500
    return problem


for solver in pulp.GUROBI, pulp.HiGHS:
    for limit in 0, 0.001:
        problem = knapsacks()
        status = problem.solve(solver(msg=False, timeLimit=limit))
        print(f"{solver.name}, timeLimit={limit}: {pulp.LpStatus[status]}, {pulp.LpSolution[problem.sol_status]}")
PYTHON
diff - "$folder/seen" <<'SEEN'
GUROBI, timeLimit=0: Optimal, Optimal Solution Found
GUROBI, timeLimit=0.001: Not Solved, No Solution Exists
HiGHS, timeLimit=0: Not Solved, No Solution Found
HiGHS, timeLimit=0.001: Not Solved, No Solution Found
SEEN
echo "as stated"
