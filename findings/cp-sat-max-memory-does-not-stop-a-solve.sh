#!/usr/bin/env bash
# OR-Tools 9.15.6755, CP-SAT: max_memory_in_mb = 1 stops nothing. The process has more than 50 MB before the solve, and the
# solve ends as OPTIMAL, by one worker and by four, with the same optimum as without the limit.
#
# Expected: the solve is aborted as soon as the limit is crossed, as the parameter's comment says. Seen: who relies on it in a
# container with little memory finds the process killed instead of a status.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check ortools==9.15.6755
"$folder/venv/bin/python" - <<'PYTHON' | tee "$folder/seen"
import random
import resource

from ortools.sat.python import cp_model

print("more than 50 MB before:", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 50_000)
for workers in 1, 4:
    for limit in None, 1:
        draw, model, solver = random.Random(0), cp_model.CpModel(), cp_model.CpSolver()
        sizes = [draw.randint(1, 40) for _ in range(40)]
        start = [model.new_int_var(0, 2000, "") for _ in sizes]
        makespan = model.new_int_var(0, 3000, "")
        model.add_no_overlap(model.new_fixed_size_interval_var(s, size, "") for s, size in zip(start, sizes))
        for s, size in zip(start, sizes):
            model.add(makespan >= s + size)
        model.minimize(makespan)
        solver.parameters.num_workers = workers
        if limit:
            solver.parameters.max_memory_in_mb = limit
        print(f"{workers} workers, limit {limit}:", solver.status_name(solver.solve(model)), int(solver.objective_value))
PYTHON
diff - "$folder/seen" <<'SEEN'
more than 50 MB before: True
1 workers, limit None: OPTIMAL 912
1 workers, limit 1: OPTIMAL 912
4 workers, limit None: OPTIMAL 912
4 workers, limit 1: OPTIMAL 912
SEEN
echo "as stated"
