#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.pipelining: the order that `Schedule1F1B` lists (`pipeline_order`, which the schedule
# visualizer draws) has on the last rank a micro-batch that does not exist, and lacks the first one. What the schedule runs
# is right: its step does not read the list.
#
# Expected: each rank lists the forward of each micro-batch once, as `ScheduleGPipe` does. Seen, with 4 stages and 4
# micro-batches: the last rank begins with 3F1 and has 3F4. A tool that plans memory by the list counts wrong.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - 2>/dev/null <<'PYTHON' | tee "$folder/seen"
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

for name in "1F1B", "GPipe":
    last = [str(action) for action in get_schedule_ops(name, 4, 4)[-1] if action and action.computation_type.value == "F"]
    print(name, "last rank:", *last)
PYTHON
diff - "$folder/seen" <<'SEEN'
1F1B last rank: 3F1 3F2 3F3 3F4
GPipe last rank: 3F0 3F1 3F2 3F3
SEEN
echo "as stated"
