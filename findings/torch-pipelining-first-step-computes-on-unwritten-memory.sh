#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.pipelining: to find shapes, the first step calls each stage and the loss once more than there
# are micro-batches, in train mode; stages behind the first get memory that nobody has written. Running statistics of a
# BatchNorm keep what they saw there.
#
# Expected: shapes are found without the module's own state, and without real values. Seen, where torch fills such memory with NaN
# (use_deterministic_algorithms): the running mean of the second stage is NaN after one step, though the gradients are right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/run.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.nn.functional import mse_loss

torch.use_deterministic_algorithms(True)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
losses = 0


def loss(output, target):
    global losses
    losses += 1
    return mse_loss(output, target)


modules = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)) for _ in range(2)]
stages = [PipelineStage(module, s, 2, torch.device("cpu")) for s, module in enumerate(modules)]
schedule, x = ScheduleInterleaved1F1B(stages, 4, loss_fn=loss), torch.randn(16, 4)
for step in 1, 2:
    before, losses = [module[1].num_batches_tracked.item() for module in modules], 0
    schedule.step(x, target=x)
    forwards = [module[1].num_batches_tracked.item() - was for module, was in zip(modules, before, strict=True)]
    finite = [bool(module[1].running_mean.isfinite().all()) for module in modules]
    grads = all(bool(p.grad.isfinite().all()) for module in modules for p in module.parameters())
    print(f"step {step} of 4 micro-batches: forwards {forwards}, losses {losses}, running means finite {finite}, gradients {grads}")
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/run.py" 2>/dev/null | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
step 1 of 4 micro-batches: forwards [5, 5], losses 5, running means finite [True, False], gradients True
step 2 of 4 micro-batches: forwards [4, 4], losses 4, running means finite [True, False], gradients True
SEEN
echo "as stated"
