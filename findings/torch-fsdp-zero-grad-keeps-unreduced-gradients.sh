#!/usr/bin/env bash
# torch 2.13.0, FSDP2 (fully_shard) with `set_requires_gradient_sync(False)`, the way to accumulate gradients over
# micro-batches: `.grad` stays None, and the gradients are kept where neither `optimizer.zero_grad()` nor `module.zero_grad()`
# finds them. What should be dropped, as after a NaN or an aborted step, is added to the next step's gradients.
#
# Expected: zero_grad drops the gradients of an accumulation, as with DistributedDataParallel's no_sync. Seen: they are added. A
# norm, a clipping or a check for NaN between the micro-batches sees no gradients either.
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
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))


def model():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 1)


first, second = torch.full((1, 4), 100.0), torch.tensor([[1.0, 2.0, 3.0, 4.0]])

replica = DistributedDataParallel(model())
with replica.no_sync():
    replica(first).sum().backward()
replica.zero_grad()
replica(second).sum().backward()
print("DDP", replica.module.weight.grad.tolist())

sharded = fully_shard(model(), mesh=mesh)
optimizer = torch.optim.SGD(sharded.parameters())
sharded.set_requires_gradient_sync(False)
sharded(first).sum().backward()
print("FSDP, before zero_grad", [p.grad for p in sharded.parameters()])
optimizer.zero_grad()
sharded.zero_grad()
sharded.set_requires_gradient_sync(True)
sharded(second).sum().backward()
print("FSDP", sharded.weight.grad.full_tensor().tolist())
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/run.py" 2>/dev/null | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
DDP [[1.0, 2.0, 3.0, 4.0]]
FSDP, before zero_grad [None, None]
FSDP [[101.0, 102.0, 103.0, 104.0]]
SEEN
echo "as stated"
