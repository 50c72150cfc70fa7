#!/usr/bin/env bash
# HiGHS 1.15.1 (highspy): for an infeasible MIP that is minimized, mip_dual_bound is -inf with presolve and +inf without it, and
# with the signs exchanged where it is maximized. The status is kInfeasible each time. mip_gap is inf where it is minimized and
# nan where it is maximized, and the objective is inf in both.
#
# Expected: +inf for a minimization, as any number is a lower bound of no solution, whatever the presolve. Seen: code that
# compares the bound with a cutoff, say to prune a subproblem, keeps or drops it by an option that should change the time only.
# A comparison with nan is false both ways.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check highspy==1.15.1
"$folder/venv/bin/python" - <<'PYTHON' | tee "$folder/seen"
import highspy

for sense in "minimize", "maximize":
    for presolve in "on", "off":
        highs = highspy.Highs()
        highs.silent()
        highs.setOptionValue("presolve", presolve)
        highs.setOptionValue("threads", 1)
        x = [highs.addIntegral(0, 10, obj=1) for _ in range(4)]
        highs.addConstr(2 * x[0] + 2 * x[1] + 2 * x[2] + 2 * x[3] == 7)
        if sense == "maximize":
            highs.changeObjectiveSense(highspy.ObjSense.kMaximize)
        highs.run()
        info = highs.getInfo()
        print(f"{sense}, presolve {presolve}: {highs.getModelStatus().name}, bound {info.mip_dual_bound}, gap {info.mip_gap}, objective {info.objective_function_value}")
PYTHON
diff - "$folder/seen" <<'SEEN'
minimize, presolve on: kInfeasible, bound -inf, gap inf, objective inf
minimize, presolve off: kInfeasible, bound inf, gap inf, objective inf
maximize, presolve on: kInfeasible, bound inf, gap nan, objective inf
maximize, presolve off: kInfeasible, bound -inf, gap nan, objective inf
SEEN
echo "as stated"
