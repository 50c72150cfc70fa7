#!/usr/bin/env bash
# gurobipy 13.0.3: a complete and feasible MIP start is dropped in two places. Model.copy() leaves out Start, without a word in
# its documentation. With TimeLimit = 0 the solve ends without a solution, while WorkLimit = 0 ends with the start.
#
# Expected: a copy has the start, and a limit of 0 returns the start whatever it counts. Seen: who passes what is left of a time
# budget, or copies a model to change it, must keep the incumbent himself.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check gurobipy==13.0.3
env -u GRB_LICENSE_FILE HOME="$folder" "$folder/venv/bin/python" - <<'PYTHON' | grep -v '^Restricted' | tee "$folder/seen"
import gurobipy

environment = gurobipy.Env(empty=True)
environment.setParam("OutputFlag", 0)
environment.start()


def knapsack():
    """A model whose start has the value 7."""
    model = gurobipy.Model(env=environment)
    x = model.addVars(12, vtype="B")
    model.setObjective(gurobipy.quicksum((7 + i) * x[i] for i in x), gurobipy.GRB.MAXIMIZE)
    model.addConstr(gurobipy.quicksum((5 + i) * x[i] for i in x) <= 40)
    for i in x:
        x[i].Start = i == 0
    model.update()
    return model


model = knapsack()
copy = model.copy()
print("start:", model.getVars()[0].Start, "start of its copy is undefined:", copy.getVars()[0].Start == gurobipy.GRB.UNDEFINED)
for limit in "TimeLimit", "WorkLimit":
    model = knapsack()
    model.setParam(limit, 0)
    model.optimize()
    print(f"{limit} = 0:", f"solution {model.ObjVal:g}" if model.SolCount else "no solution")
PYTHON
diff - "$folder/seen" <<'SEEN'
start: 1.0 start of its copy is undefined: True
TimeLimit = 0: no solution
WorkLimit = 0: solution 7
SEEN
echo "as stated"
