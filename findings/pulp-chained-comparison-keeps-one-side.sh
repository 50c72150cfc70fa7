#!/usr/bin/env bash
# PuLP 3.3.2: of a constraint 5 <= x <= 8 only x <= 8 is added, without a warning. With highspy 1.15.1 the same line is a row
# with both limits, and gurobipy 13.0.3 refuses it with an error that names the cause.
#
# Expected: both limits or an error. Seen: the solution breaks the lower limit and is called Optimal.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check pulp==3.3.2 highspy==1.15.1 gurobipy==13.0.3
env -u GRB_LICENSE_FILE HOME="$folder" "$folder/venv/bin/python" - <<'PYTHON' | grep -v '^Restricted' | tee "$folder/seen"
import gurobipy
import highspy
import pulp

problem = pulp.LpProblem("window", pulp.LpMinimize)
x = pulp.LpVariable("x", 0, 10)
problem += x
problem += 5 <= x <= 8
problem.solve(pulp.HiGHS(msg=False))
print("pulp:", pulp.LpStatus[problem.status], "x =", x.value(), [str(c) for c in problem.constraints.values()])

highs = highspy.Highs()
highs.silent()
x = highs.addVariable(0, 10)
highs.addConstr(5 <= x <= 8)
highs.minimize(x)
print("highspy: x =", highs.val(x))

environment = gurobipy.Env(empty=True)
environment.setParam("OutputFlag", 0)
environment.start()
model = gurobipy.Model(env=environment)
x = model.addVar(0, 10)
model.update()
try:
    model.addConstr(5 <= x <= 8)
except gurobipy.GurobiError as error:
    print("gurobipy:", type(error).__name__)
PYTHON
diff - "$folder/seen" <<'SEEN'
pulp: Optimal x = 0.0 ['x <= 8']
highspy: x = 5.0
gurobipy: GurobiError
SEEN
echo "as stated"
