#!/usr/bin/env bash
# PuLP 3.3.2: a model that is written with to_json, writeMPS or writeLP and read again has lost the constant of its objective,
# without a warning. The MPS file also names the sense in a comment only, so HiGHS (highspy 1.15.1) minimizes what PuLP
# maximizes.
#
# Expected: the same optimum as before, or an error. Seen: with a fixed cost or a reward for each job in the constant, the
# optimum of the copy is another number, and from the MPS file it is another solution.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check pulp==3.3.2 highspy==1.15.1
"$folder/venv/bin/python" - <<'PYTHON' | tee "$folder/seen"
import os
import tempfile

import highspy
import pulp


def solve(problem):
    problem.solve(pulp.HiGHS(msg=False))
    return f"{problem.objective.value():g}"


def solve_file(path):
    highs = highspy.Highs()
    highs.silent()
    highs.readModel(path)
    highs.run()
    return f"{highs.getObjectiveValue():g}"


problem = pulp.LpProblem("profit", pulp.LpMaximize)
jobs = pulp.LpVariable("jobs", 0, 10, cat="Integer")
problem += 3 * jobs - 1000
problem += 2 * jobs <= 15
print("built:", solve(problem))
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "profit")
    problem.to_json(path + ".json")
    problem.writeMPS(path + ".mps")
    problem.writeLP(path + ".lp")
    print("JSON, PuLP:", solve(pulp.LpProblem.from_json(path + ".json")[1]))
    print("MPS, PuLP told to maximize:", solve(pulp.LpProblem.fromMPS(path + ".mps", sense=pulp.LpMaximize)[1]))
    print("MPS, HiGHS:", solve_file(path + ".mps"))
    print("LP, HiGHS:", solve_file(path + ".lp"))
PYTHON
diff - "$folder/seen" <<'SEEN'
built: -979
JSON, PuLP: 21
MPS, PuLP told to maximize: 21
MPS, HiGHS: 0
LP, HiGHS: 21
SEEN
echo "as stated"
