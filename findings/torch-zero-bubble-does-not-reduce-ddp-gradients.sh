#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.pipelining with a zero-bubble schedule: replicas by DistributedDataParallel get different
# gradients on all stages but the first, without an error or a warning. With ScheduleInterleaved1F1B, same stages and same
# data, they are equal.
#
# Expected: the gradients of replicas are equal after a step, or the combination is refused. Seen: each replica of those stages
# keeps gradients of its own, so replicas drift apart.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/run.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "pipe"))
replica, rank = mesh["replica"].get_local_rank(), mesh["pipe"].get_local_rank()
replicas, pipe = mesh["replica"].get_group(), mesh["pipe"].get_group()
for kind in ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble:
    torch.manual_seed(0)
    model = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4)) for _ in range(4)]
    mine = {s: DistributedDataParallel(model[s], process_group=replicas) for s in (rank, rank + 2)}
    stages = [PipelineStage(module, s, 4, torch.device("cpu"), group=pipe) for s, module in mine.items()]
    schedule = kind(stages, 4, loss_fn=torch.nn.functional.mse_loss)
    torch.manual_seed(1 + replica)
    x, target = torch.randn(8, 4), torch.randn(8, 4)
    schedule.step(x) if rank == 0 else schedule.step(target=target)
    equal = {}
    for s, module in mine.items():
        flat = torch.cat([p.grad.flatten() for p in module.parameters()])
        both = [torch.empty_like(flat) for _ in range(2)]
        dist.all_gather(both, flat, group=replicas)
        equal[s] = torch.equal(*both)
    of_all = [None] * 4
    dist.all_gather_object(of_all, equal)
    if dist.get_rank() == 0:
        of_stage = of_all[0] | of_all[1]
        print(kind.__name__, *(f"stage {s} {'equal' if of_stage[s] else 'different'}" for s in range(4)), sep="; ")
dist.destroy_process_group()
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --nproc-per-node 4 "$folder/run.py" 2>/dev/null | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
ScheduleInterleaved1F1B; stage 0 equal; stage 1 equal; stage 2 equal; stage 3 equal
ScheduleInterleavedZeroBubble; stage 0 equal; stage 1 different; stage 2 different; stage 3 different
SEEN
echo "as stated"
