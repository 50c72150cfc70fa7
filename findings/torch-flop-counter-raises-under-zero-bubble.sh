#!/usr/bin/env bash
# torch 2.13.0, FlopCounterMode (by its module tracker): torch.autograd.grad with respect to a leaf, such as a module's input,
# raises "A leaf node was passed to _will_engine_execute_node" once a module has been called under the counter. So a step of a
# zero-bubble schedule, whose I is such a call, cannot be counted. `backward(inputs=...)` for the same leaf can.
#
# Expected: the operations of the gradient of the input alone, as without modules. Seen: RuntimeError.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/run.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.nn.functional import linear, mse_loss
from torch.utils.flop_counter import FlopCounterMode

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def count(name, compute):
    try:
        with FlopCounterMode(display=False) as counter:
            compute()
        print(name, counter.get_total_flops(), sep=": ")
    except RuntimeError as error:
        said = str(error.__cause__ or error).split(" but ")[0]
        print(name, said, sep=": ")


layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
count("a function", lambda: torch.autograd.grad(linear(x, layer.weight).sum(), [x]))
count("a module", lambda: torch.autograd.grad(layer(x).sum(), [x]))
count("a module, backward(inputs=)", lambda: layer(x).sum().backward(inputs=[x]))
for kind in ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble:
    stages = [PipelineStage(torch.nn.Linear(4, 4), s, 2, torch.device("cpu")) for s in range(2)]
    schedule, data = kind(stages, 2, loss_fn=mse_loss), torch.ones(4, 4)
    schedule.step(data, target=data)  # finds shapes
    count(kind.__name__, lambda: schedule.step(data, target=data))
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/run.py" 2>/dev/null | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
a function: 128
a module: A leaf node was passed to _will_engine_execute_node
a module, backward(inputs=): 128
ScheduleInterleaved1F1B: 640
ScheduleInterleavedZeroBubble: A leaf node was passed to _will_engine_execute_node
SEEN
echo "as stated"
