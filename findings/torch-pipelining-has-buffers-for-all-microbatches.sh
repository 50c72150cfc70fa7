#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.pipelining: a stage allocates a receive buffer for each input and each output's gradient of
# every micro-batch in its first step, and keeps them for good, also between steps. Their memory grows with the number of
# micro-batches under Schedule1F1B, too, of which at most as many micro-batches are under way as there are stages.
#
# Expected: as many buffers as micro-batches under way, 2 on the first rank and 1 on the last, or none between steps. Seen, with
# 4, 16 and 64 micro-batches: 4, 16 and 64 on each rank. A memory model of 1F1B that counts activations under way is too low.
# Counted are live tensors of the shape of the activation between the two stages.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/run.py" <<'PYTHON'
import gc

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import mse_loss

dist.init_process_group("gloo")
rank = dist.get_rank()
for n in 4, 16, 64:
    module = torch.nn.Linear(4, 7) if rank == 0 else torch.nn.Linear(7, 3)
    schedule = Schedule1F1B(PipelineStage(module, rank, 2, torch.device("cpu")), n, loss_fn=mse_loss)
    for _ in range(2):
        if rank == 0:
            schedule.step(torch.ones(2 * n, 4), return_outputs=False)
        else:
            schedule.step(target=torch.ones(2 * n, 3), return_outputs=False)
    gc.collect()
    alive = {t.untyped_storage().data_ptr() for t in gc.get_objects() if type(t) is torch.Tensor and t.shape == (2, 7)}
    of_all = [None] * 2
    dist.all_gather_object(of_all, len(alive))
    if rank == 0:
        print(f"{n} micro-batches: buffers after a step {of_all}")
    del schedule
dist.destroy_process_group()
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --nproc-per-node 2 "$folder/run.py" 2>/dev/null | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
4 micro-batches: buffers after a step [4, 4]
16 micro-batches: buffers after a step [16, 16]
64 micro-batches: buffers after a step [64, 64]
SEEN
echo "as stated"
