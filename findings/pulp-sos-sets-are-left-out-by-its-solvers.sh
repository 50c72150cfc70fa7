#!/usr/bin/env bash
# PuLP 3.3.2: LpProblem has special ordered sets in sos1 and sos2 and writes them to LP files, but HiGHS (highspy 1.15.1),
# GUROBI (gurobipy 13.0.3) and the CBC that comes with PuLP never get them. There is no warning, the status is Optimal, and
# valid() is true.
#
# Expected: at most one variable of the set is not 0, or an error from a solver that has no such sets. Seen: all of them are 1.
# A model that chooses one mode per job by a set chooses all modes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check pulp==3.3.2 highspy==1.15.1 gurobipy==13.0.3
env -u GRB_LICENSE_FILE HOME="$folder" "$folder/venv/bin/python" - <<'PYTHON' | grep -v '^Restricted' | tee "$folder/seen"
import os
import tempfile

import pulp

for solver in pulp.HiGHS(msg=False), pulp.GUROBI(msg=False), pulp.PULP_CBC_CMD(msg=False):
    problem = pulp.LpProblem("modes", pulp.LpMaximize)
    mode = [pulp.LpVariable(f"mode{i}", 0, 1) for i in range(3)]
    problem += pulp.lpSum(mode)
    problem += pulp.lpSum(mode) <= 3
    problem.sos1["one"] = {x: i + 1 for i, x in enumerate(mode)}
    problem.solve(solver)
    print(f"{solver.name}: {pulp.LpStatus[problem.status]}, {[abs(x.value()) for x in mode]}, valid {problem.valid()}")
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "modes.lp")
    problem.writeLP(path)
    print("in the LP file:", "S1:: " in open(path).read())
PYTHON
diff - "$folder/seen" <<'SEEN'
HiGHS: Optimal, [1.0, 1.0, 1.0], valid True
GUROBI: Optimal, [1.0, 1.0, 1.0], valid True
PULP_CBC_CMD: Optimal, [1.0, 1.0, 1.0], valid True
in the LP file: True
SEEN
echo "as stated"
