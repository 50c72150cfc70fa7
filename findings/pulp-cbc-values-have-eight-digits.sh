#!/usr/bin/env bash
# PuLP 3.3.2: values and objective of its default solver, the CBC that comes with it, are read from a file with eight digits. An
# integer variable whose optimum is 1,234,567,849 has the value 1,234,567,800; the status is Optimal, and problem.valid() is
# false. With HiGHS (highspy 1.15.1) the values are right.
#
# Expected: a double's 15 digits, or a warning. Seen: start times in milliseconds or microseconds are rounded, so that the order
# of near events is lost, and a solution does not satisfy its own constraints.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check pulp==3.3.2 highspy==1.15.1
"$folder/venv/bin/python" - <<'PYTHON' | tee "$folder/seen"
import pulp

for solver in pulp.PULP_CBC_CMD(msg=False), pulp.HiGHS(msg=False):
    problem = pulp.LpProblem("two_operations", pulp.LpMinimize)
    first = pulp.LpVariable("first", 1_234_567_849, cat="Integer")
    second = pulp.LpVariable("second", 0, cat="Integer")
    problem += second
    problem += second >= first + 5
    problem.solve(solver)
    a, b = int(first.value()), int(second.value())
    print(f"{solver.name}: {pulp.LpStatus[problem.status]}, {a:,} and {b:,}, valid {problem.valid(1e-6)}")
PYTHON
diff - "$folder/seen" <<'SEEN'
PULP_CBC_CMD: Optimal, 1,234,567,800 and 1,234,567,900, valid False
HiGHS: Optimal, 1,234,567,849 and 1,234,567,854, valid True
SEEN
echo "as stated"
