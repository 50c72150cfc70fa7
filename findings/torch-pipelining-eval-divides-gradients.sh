#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.pipelining: `eval()` divides the gradients that an earlier `step()` left in `.grad` by the
# number of micro-batches, each time it is called; a second `step()` without zero_grad divides those of the first again.
#
# Expected: an evaluation leaves gradients alone, and steps add up as in plain training. Seen, with 4 micro-batches: after
# `eval()` 1/4, after another one 1/16; after a further `step()` 1/64 + 1 instead of 1/16 + 1. No warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/run.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

dist.init_process_group("gloo")
rank = dist.get_rank()
x, target = torch.ones(8, 4), torch.zeros(8, 4)
for kind in Schedule1F1B, ScheduleGPipe:
    torch.manual_seed(rank)
    module = torch.nn.Linear(4, 4)
    schedule = kind(PipelineStage(module, rank, 2, torch.device("cpu")), 4, loss_fn=torch.nn.functional.mse_loss)

    def left_by(call):
        call(x) if rank == 0 else call(target=target)
        return module.weight.grad.clone()

    once = left_by(schedule.step)
    shares = [left_by(call) / once for call in (schedule.eval, schedule.eval, schedule.step)]
    if rank == 0:
        print(kind.__name__, *(f"{share.mean():.6f}" for share in shares))
dist.barrier()
dist.destroy_process_group()
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --nproc-per-node 2 "$folder/run.py" 2>/dev/null | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
Schedule1F1B 0.250000 0.062500 1.015625
ScheduleGPipe 0.250000 0.062500 1.015625
SEEN
echo "as stated"
