#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.pipelining: `eval()`, which calls forward only, records the graph for a backward unless the
# caller adds torch.no_grad(). All micro-batches' activations are alive at its end, and stay until the next step begins, also
# where the outputs are dropped. So an evaluation by Schedule1F1B needs the memory of GPipe.
#
# Expected: no activations, as no backward can follow, or at most those of one micro-batch. Seen, with 8 micro-batches and 4
# saved tensors each on one stage: 32 at the end of `eval()` and after it; training by 1F1B has 4 at its peak. "saved" counts
# what the stage's forward keeps for its backward.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/run.py" <<'PYTHON'
import weakref

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import mse_loss

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class Saved:
    def __init__(self, tensor):
        self.tensor = tensor


class Stage(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
        self.saved, self.peak = weakref.WeakSet(), 0

    def pack(self, tensor):
        saved = Saved(tensor)
        self.saved.add(saved)
        return saved

    def forward(self, x):
        with saved_tensors_hooks(self.pack, lambda saved: saved.tensor):
            y = self.layers(x)
        self.peak = max(self.peak, len(self.saved))
        return y


for kind in Schedule1F1B, ScheduleGPipe:
    stage, x = Stage(), torch.ones(16, 4)
    schedule = kind(PipelineStage(stage, 0, 1, torch.device("cpu")), 8, loss_fn=mse_loss)
    schedule.step(x, target=x)  # finds shapes, by forwards of its own
    for name in "step", "eval", "eval in no_grad":
        stage.saved.clear()
        stage.peak = 0
        with torch.set_grad_enabled(name != "eval in no_grad"):
            getattr(schedule, name.split()[0])(x, target=x)
        print(f"{kind.__name__}, {name}: saved at the peak {stage.peak}, afterwards {len(stage.saved)}")
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/run.py" 2>/dev/null | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
Schedule1F1B, step: saved at the peak 4, afterwards 0
Schedule1F1B, eval: saved at the peak 32, afterwards 32
Schedule1F1B, eval in no_grad: saved at the peak 0, afterwards 0
ScheduleGPipe, step: saved at the peak 32, afterwards 0
ScheduleGPipe, eval: saved at the peak 32, afterwards 32
ScheduleGPipe, eval in no_grad: saved at the peak 0, afterwards 0
SEEN
echo "as stated"
