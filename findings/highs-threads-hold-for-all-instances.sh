#!/usr/bin/env bash
# highspy 1.15.1: the first run in a process fixes the number of threads for all instances. Another instance that asks for
# another number is told kOk by setOptionValue, and its run then does nothing: run() returns kError, no exception, status kNotset,
# objective 0. With the first number, or after resetGlobalScheduler, the same instance is solved.
#
# Expected: instances are independent, or the option is refused where it is set. Seen: only run()'s return value says it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check highspy==1.15.1
"$folder/venv/bin/python" - <<'PYTHON' | tee "$folder/seen"
import highspy


def solve(threads):
    highs = highspy.Highs()
    highs.silent()
    option = highs.setOptionValue("threads", threads)
    highs.addIntegral(4, 10, obj=1)
    run = highs.run()
    print(f"threads = {threads}: {option.name}, run: {run.name}, {highs.getModelStatus().name}, objective {highs.getObjectiveValue()}")


solve(1)
solve(2)
solve(1)
highspy.Highs.resetGlobalScheduler(True)
solve(2)
PYTHON
diff - "$folder/seen" <<'SEEN'
threads = 1: kOk, run: kOk, kOptimal, objective 4.0
threads = 2: kOk, run: kError, kNotset, objective 0.0
threads = 1: kOk, run: kOk, kOptimal, objective 4.0
threads = 2: kOk, run: kOk, kOptimal, objective 4.0
SEEN
echo "as stated"
