#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.pipelining: a schedule loaded from a file may run micro-batches in any order, and its check
# accepts it. But outputs and losses are listed in the order in which the last stage ran, and read as if by number. `eval()`
# returns the rows of the batch in another order, silently, and so does the list of losses. Where a backward comes before the
# forward of a lower number, it raises.
#
# Expected: rows and losses in the order of the batch, or a schedule that is refused when it is loaded. Backwards may run in any
# order. Seen: forwards may not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/run.py" <<'PYTHON'
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn.functional import mse_loss

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = torch.arange(4.0).reshape(4, 1)
for row in "0F0,0F1,0B0,0B1", "0F0,0F1,0B1,0B0", "0F1,0F0,0B1,0B0", "0F1,0B1,0F0,0B0":
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(module.weight)
    schedule = _PipelineScheduleRuntime([PipelineStage(module, 0, 1, torch.device("cpu"))], 2, loss_fn=mse_loss)
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        print(row, file=file, flush=True)
        schedule._load_csv(file.name)
    losses = []
    try:
        with torch.no_grad():
            output = schedule.eval(x, target=torch.zeros(4, 1), losses=losses)
        print(f"{row}: eval {output.flatten().tolist()}, losses {[loss.item() for loss in losses]}", flush=True)
        schedule.step(x, target=torch.zeros(4, 1))
        print(f"{row}: step gives {module.weight.grad.item()}", flush=True)
    except RuntimeError as error:
        print(f"{row}: raises {type(error).__name__}", flush=True)
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/run.py" 2>/dev/null | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
0F0,0F1,0B0,0B1: eval [0.0, 1.0, 2.0, 3.0], losses [0.5, 6.5]
0F0,0F1,0B0,0B1: step gives 7.0
0F0,0F1,0B1,0B0: eval [0.0, 1.0, 2.0, 3.0], losses [0.5, 6.5]
0F0,0F1,0B1,0B0: step gives 7.0
0F1,0F0,0B1,0B0: eval [2.0, 3.0, 0.0, 1.0], losses [6.5, 0.5]
0F1,0F0,0B1,0B0: step gives 7.0
0F1,0B1,0F0,0B0: raises RuntimeError
SEEN
echo "as stated"
