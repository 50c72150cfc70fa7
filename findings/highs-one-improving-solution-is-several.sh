#!/usr/bin/env bash
# HiGHS 1.15.1 (highspy): with mip_max_improving_sols = 1 the solve ends with kSolutionLimit after the fourth improving solution,
# by the callback for improving solutions, and the value is the same with a limit of 2.
#
# Expected: the first solution ends the solve. Seen: what the root node's heuristics find is counted late, so who wants the first
# feasible solution waits for several.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check highspy==1.15.1
"$folder/venv/bin/python" - <<'PYTHON' | tee "$folder/seen"
import random

import highspy

for limit in 1, 2:
    draw, items, highs, seen = random.Random(0), range(40), highspy.Highs(), []
    for name, value in {"output_flag": False, "threads": 1, "mip_max_improving_sols": limit}.items():
        highs.setOptionValue(name, value)
    x = [highs.addBinary() for _ in items]
    for _ in range(10):
        weights = [draw.randint(10, 99) for _ in items]
        highs.addConstr(sum(w * v for w, v in zip(weights, x)) <= sum(weights) // 2)
    for i in items:
        highs.changeColCost(i, draw.randint(10, 99))
    highs.changeObjectiveSense(highspy.ObjSense.kMaximize)
    highs.cbMipImprovingSolution += lambda event: seen.append(round(event.data_out.objective_function_value))
    highs.run()
    print(f"limit {limit}: {highs.getModelStatus().name}, improving solutions", *seen)
PYTHON
diff - "$folder/seen" <<'SEEN'
limit 1: kSolutionLimit, improving solutions 0 99 1278 1336
limit 2: kSolutionLimit, improving solutions 0 99 1278 1336
SEEN
echo "as stated"
