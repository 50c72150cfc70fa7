#!/usr/bin/env bash
# HiGHS 1.15.1 (highspy): run() called again on one instance starts its time_limit anew, while getRunTime() goes on adding
# up. After three runs with a limit of 1 s the run time is 3 s.
#
# Expected: the limit and the time that is reported count from the same moment. Seen: a budget shared by several runs must
# be set anew before each of them, and getRunTime() is not what a run took.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check highspy==1.15.1
"$folder/venv/bin/python" - <<'PYTHON' | tee "$folder/seen"
import random

import highspy

draw, items = random.Random(1), range(60)
highs = highspy.Highs()
for name, value in {"output_flag": False, "threads": 1, "time_limit": 1.0}.items():
    highs.setOptionValue(name, value)
x = [highs.addBinary() for _ in items]
for _ in range(30):
    weights = [draw.randint(10, 99) for _ in items]
    highs.addConstr(sum(w * v for w, v in zip(weights, x)) <= sum(weights) // 2)
highs.changeObjectiveSense(highspy.ObjSense.kMaximize)
for i in items:
    highs.changeColCost(i, draw.randint(10, 99))
before = 0.0
for run in range(1, 4):
    highs.run()
    took, before = highs.getRunTime() - before, highs.getRunTime()
    print(f"run {run}: {highs.getModelStatus().name}, took at least 0.9 s: {took > 0.9}, run time above {run - 1}.9 s: {before > run - 0.1}")
PYTHON
diff - "$folder/seen" <<'SEEN'
run 1: kTimeLimit, took at least 0.9 s: True, run time above 0.9 s: True
run 2: kTimeLimit, took at least 0.9 s: True, run time above 1.9 s: True
run 3: kTimeLimit, took at least 0.9 s: True, run time above 2.9 s: True
SEEN
echo "as stated"
