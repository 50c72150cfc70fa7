#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.pipelining with a zero-bubble schedule, stages sharded by FSDP2: right where only the whole
# stage is given to fully_shard; where its blocks are, too, as trainings do, the gradients of middle stages are wrong and those
# of the last stage are None. No error, no warning. With ScheduleInterleaved1F1B both are right.
#
# Expected: the same gradients however a stage is wrapped, or an error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/run.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.nn import Linear, Sequential, Tanh
from torch.nn.functional import mse_loss

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "pipe"))
replica, rank = mesh["replica"].get_local_rank(), mesh["pipe"].get_local_rank()


def model():
    torch.manual_seed(0)
    return [Sequential(*(Sequential(Linear(4, 4), Tanh()) for _ in range(2))) for _ in range(4)]


def data(of):
    generator = torch.Generator().manual_seed(1 + of)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 4, generator=generator)


plain = model()
for of in range(2):
    x, target = data(of)
    (mse_loss(Sequential(*plain)(x), target) / 2).backward()
for nested in False, True:
    for kind in ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble:
        whole, mine = model(), {}
        for s in rank, rank + 2:
            for block in whole[s] if nested else ():
                fully_shard(block, mesh=mesh["replica"])
            mine[s] = fully_shard(whole[s], mesh=mesh["replica"])
        stages = [PipelineStage(m, s, 4, torch.device("cpu"), group=mesh["pipe"].get_group()) for s, m in mine.items()]
        schedule = kind(stages, 4, loss_fn=mse_loss)
        x, target = data(replica)
        schedule.step(x) if rank == 0 else schedule.step(target=target)
        seen = {}
        for s, m in mine.items():
            pairs = [(p.grad, q.grad) for p, q in zip(m.parameters(), plain[s].parameters(), strict=True)]
            if any(grad is None for grad, _ in pairs):
                seen[s] = "none"
            else:
                right = all([torch.allclose(grad.full_tensor(), of, rtol=1e-4, atol=1e-7) for grad, of in pairs])
                seen[s] = "right" if right else "wrong"
        of_all = [None] * 4
        dist.all_gather_object(of_all, seen)
        if dist.get_rank() == 0:
            by_stage = of_all[0] | of_all[1]
            print("blocks and stage" if nested else "stage", kind.__name__, *(by_stage[s] for s in range(4)))
dist.destroy_process_group()
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --nproc-per-node 4 "$folder/run.py" 2>/dev/null | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
stage ScheduleInterleaved1F1B right right right right
stage ScheduleInterleavedZeroBubble right right right right
blocks and stage ScheduleInterleaved1F1B right right right right
blocks and stage ScheduleInterleavedZeroBubble right wrong wrong none
SEEN
echo "as stated"
