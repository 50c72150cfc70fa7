#!/usr/bin/env bash
# gurobipy 13.0.3: the licence in its pip package takes 2,000 variables and 2,000 linear constraints. General indicator
# constraints count as linear ones, though `NumConstrs` leaves them out: 1,500 rows and 500 indicators are solved, 501 are
# refused, at 1,500 rows by `NumConstrs`.
#
# Expected: a model whose NumVars and NumConstrs are below the limits is taken. Seen: it is not, and the error names no count.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check gurobipy==13.0.3
env -u GRB_LICENSE_FILE HOME="$folder" "$folder/venv/bin/python" - <<'PYTHON' | tee "$folder/seen"
import gurobipy

environment = gurobipy.Env(empty=True)
environment.setParam("OutputFlag", 0)
environment.start()
for rows, indicators in (1500, 500), (1500, 501), (0, 2000), (0, 2001):
    model = gurobipy.Model(env=environment)
    x, y = model.addVars(1000, vtype="B"), model.addVar()
    for i in range(rows):
        model.addConstr(x[i % 1000] + x[(i + 1) % 1000] <= 2)
    for i in range(indicators):
        model.addGenConstrIndicator(x[i % 1000], 1, y >= i % 7)
    model.setObjective(y)
    try:
        model.optimize()
        says = "optimal" if model.Status == gurobipy.GRB.OPTIMAL else model.Status
    except gurobipy.GurobiError as error:
        says = str(error).split(";")[0]
    print(f"NumVars {model.NumVars}, NumConstrs {model.NumConstrs}, NumGenConstrs {model.NumGenConstrs}: {says}")
PYTHON
diff - "$folder/seen" <<'SEEN'
NumVars 1001, NumConstrs 1500, NumGenConstrs 500: optimal
NumVars 1001, NumConstrs 1500, NumGenConstrs 501: Model too large for size-limited license
NumVars 1001, NumConstrs 0, NumGenConstrs 2000: optimal
NumVars 1001, NumConstrs 0, NumGenConstrs 2001: Model too large for size-limited license
SEEN
echo "as stated"
