#!/usr/bin/env bash
# HiGHS 1.15.1 (highspy): a model that is written as an LP file and read again has its columns in the order in which the file
# names them, so one without cost moves to the end. writeModel and readModel both return kOk, and the optimum is the same. A row
# with two limits comes back as two rows. As an MPS file the model comes back as it was. And with a column named end, a keyword
# of the format, writeModel returns kOk for a file that readModel refuses.
#
# Expected: the same model, as its solution is an array without names. Seen: a solution that is read by index belongs to other
# variables, and a stored solution that is given to setSolution is another point.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check highspy==1.15.1
"$folder/venv/bin/python" - <<'PYTHON' | tee "$folder/seen"
import os
import tempfile

import highspy


def solve(highs):
    highs.silent()
    highs.setOptionValue("threads", 1)
    highs.run()
    lp = highs.getLp()
    return f"objective {highs.getObjectiveValue():g}, columns {lp.col_names_} = {list(highs.getSolution().col_value)}, rows {lp.row_names_}"


model = highspy.Highs()
model.silent()
start = model.addIntegral(0, 9, name="start")
finish = model.addIntegral(0, 9, obj=1, name="finish")
model.addConstr(2 <= finish - start <= 4, "size")
model.addConstr(start >= 3, "release")
print("built:", solve(model))
with tempfile.TemporaryDirectory() as folder:
    for name in "model.lp", "model.mps":
        path = os.path.join(folder, name)
        again = highspy.Highs()
        again.silent()
        print(name, model.writeModel(path).name, again.readModel(path).name, solve(again))
    model.passColName(1, "end")
    print("column named end:", model.writeModel(os.path.join(folder, "end.lp")).name, again.readModel(os.path.join(folder, "end.lp")).name)
PYTHON
diff - "$folder/seen" <<'SEEN'
built: objective 5, columns ['start', 'finish'] = [3.0, 5.0], rows ['size', 'release']
model.lp kOk kOk objective 5, columns ['finish', 'start'] = [5.0, 3.0], rows ['sizelo', 'sizeup', 'release']
model.mps kOk kOk objective 5, columns ['start', 'finish'] = [3.0, 5.0], rows ['size', 'release']
column named end: kOk kError
SEEN
echo "as stated"
