#!/usr/bin/env bash
# OR-Tools 9.15.6755, CP-SAT: user_time is the time of the clock. A callback that sleeps for a second adds a second to it, and
# it does not grow with the number of workers.
#
# Expected: processor time, as user time is elsewhere, of all workers. Seen: wall_time once more, so time measured on a busy machine
# cannot be told from work by it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check ortools==9.15.6755
"$folder/venv/bin/python" - <<'PYTHON' | tee "$folder/seen"
import time

from ortools.sat.python import cp_model


class Sleeper(cp_model.CpSolverSolutionCallback):
    def on_solution_callback(self):
        time.sleep(1)


model = cp_model.CpModel()
x = model.new_int_var(0, 9, "x")
y = model.new_int_var(0, 9, "y")
model.add(x + y == 9)
model.maximize(x)
solver = cp_model.CpSolver()
solver.parameters.num_workers = 1
before = time.process_time()
solver.solve(model, Sleeper())
computed = time.process_time() - before
equal = abs(solver.user_time - solver.wall_time) < 0.01
half = computed > solver.user_time / 2
print(f"user_time at least 1 s: {solver.user_time >= 1}, equal to wall_time: {equal}, half of it computed: {half}")
PYTHON
diff - "$folder/seen" <<'SEEN'
user_time at least 1 s: True, equal to wall_time: True, half of it computed: False
SEEN
echo "as stated"
