#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.pipelining: `eval()` of a schedule that places neighbouring stages on one rank raises once
# the schedule knows its backward. Of the V-shaped schedules, after a `step()` that trains, an evaluation is impossible.
#
# Expected: `eval()` runs the forwards, as it does where no neighbours share a rank. Seen: it runs the backward actions of
# the schedule without a backward, and the rank with stages 1 and 2 raises: "can't steal_bwd_input if this stage doesn't
# have backward".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/run.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

kind, placed = {
    "looped": (ScheduleInterleavedZeroBubble, ((0, 2), (1, 3))),
    "v": (ScheduleZBVZeroBubble, ((0, 3), (1, 2))),
}[sys.argv[1]]
dist.init_process_group("gloo")
mine = placed[dist.get_rank()]
x, target = torch.ones(8, 4), torch.zeros(8, 4)
stages = [PipelineStage(torch.nn.Linear(4, 4), s, 4, torch.device("cpu")) for s in mine]
schedule = kind(stages, 4, loss_fn=torch.nn.functional.mse_loss)
for name in "step", "eval":
    try:
        getattr(schedule, name)(*([x] if 0 in mine else []), target=target if 3 in mine else None)
        said = "runs"
    except AssertionError as error:
        said = f"raises: {error}"
    except RuntimeError:  # its peer is gone
        continue
    if 1 in mine:
        print(sys.argv[1], name, said, flush=True)
PYTHON
for shape in looped v; do
  OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --nproc-per-node 2 "$folder/run.py" $shape 2>/dev/null || true
done | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
looped step runs
looped eval runs
v step runs
v eval raises: can't steal_bwd_input if this stage doesn't have backward
SEEN
echo "as stated"
