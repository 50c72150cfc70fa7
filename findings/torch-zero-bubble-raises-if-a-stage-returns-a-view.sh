#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.pipelining with a zero-bubble schedule: a stage whose output is a view of a tensor with a
# gradient raises "Can't detach views in-place" in its first backward: a transpose back to the batch first, a slice, or just a
# linear layer of a batch of sequences. With ScheduleInterleaved1F1B the same stages train.
#
# Expected: any output that the other schedules take. Seen: RuntimeError; `.contiguous()` helps only where it copies, `.clone()`
# does. Whether a model can be trained depends on the last operation of its stages.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/run.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.nn.functional import mse_loss

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class Stage(torch.nn.Module):
    def __init__(self, last):
        super().__init__()
        self.layer, self.last = torch.nn.Linear(4, 4), last

    def forward(self, x):
        return self.last(self.layer(x))


ways = {
    "linear layer": lambda y: y,
    "linear layer, clone": lambda y: y.clone(),
    "tanh": torch.tanh,
    "tanh, transpose": lambda y: y.tanh().transpose(0, 1).transpose(0, 1),
    "tanh, slice": lambda y: y.tanh()[..., :4],
    "tanh, slice, contiguous": lambda y: y.tanh()[..., :4].contiguous(),
}
for name, last in ways.items():
    for kind in ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble:
        stages = [PipelineStage(Stage(last), s, 3, torch.device("cpu")) for s in range(3)]
        x = torch.ones(8, 2, 4)
        try:
            kind(stages, 4, loss_fn=mse_loss).step(x, target=x)
            said = "trains"
        except RuntimeError as error:
            said = str(error.__cause__).split(".")[0]
        print(name, kind.__name__, said, sep=": ")
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/run.py" 2>/dev/null | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
linear layer: ScheduleInterleaved1F1B: trains
linear layer: ScheduleInterleavedZeroBubble: Can't detach views in-place
linear layer, clone: ScheduleInterleaved1F1B: trains
linear layer, clone: ScheduleInterleavedZeroBubble: trains
tanh: ScheduleInterleaved1F1B: trains
tanh: ScheduleInterleavedZeroBubble: trains
tanh, transpose: ScheduleInterleaved1F1B: trains
tanh, transpose: ScheduleInterleavedZeroBubble: Can't detach views in-place
tanh, slice: ScheduleInterleaved1F1B: trains
tanh, slice: ScheduleInterleavedZeroBubble: Can't detach views in-place
tanh, slice, contiguous: ScheduleInterleaved1F1B: trains
tanh, slice, contiguous: ScheduleInterleavedZeroBubble: Can't detach views in-place
SEEN
echo "as stated"
