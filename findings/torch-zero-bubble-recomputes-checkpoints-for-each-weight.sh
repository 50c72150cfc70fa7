#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.pipelining with a zero-bubble schedule: a stage whose block is checkpointed computes the
# block again once in I, and in W once for each group of parameters. With a selective checkpoint W raises.
#
# Expected: as often as with a whole backward, once more than the forward, or an error. Seen, with two linear layers in the
# block: 4 times with I and W, 2 with a whole backward.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/run.py" <<'PYTHON'
import functools

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
products = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])


class Stage(torch.nn.Module):
    def __init__(self, **how):
        super().__init__()
        self.block = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
        self.how, self.computed = how, 0

    def compute(self, x):
        self.computed += x.device.type != "meta"
        return self.block(x)

    def forward(self, x):
        return checkpoint(self.compute, x, use_reentrant=False, **self.how)


for name, how in ("full", {}), ("selective", {"context_fn": products}):
    for kind in ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble:
        modules = [Stage(**how) for _ in range(2)]
        stages = [PipelineStage(module, s, 2, torch.device("cpu")) for s, module in enumerate(modules)]
        schedule = kind(stages, 1, loss_fn=torch.nn.functional.mse_loss)
        x, before = torch.randn(2, 4), 0
        try:
            for _ in range(2):  # shapes are found in the first step, by forwards of their own
                before = modules[1].computed
                schedule.step(x, target=x)
            print(name, kind.__name__, modules[1].computed - before, "times")
        except RuntimeError as error:
            print(name, kind.__name__, str(error)[:33])
PYTHON
"$folder/venv/bin/python" "$folder/run.py" 2>/dev/null | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
full ScheduleInterleaved1F1B 2 times
full ScheduleInterleavedZeroBubble 4 times
selective ScheduleInterleaved1F1B 2 times
selective ScheduleInterleavedZeroBubble Trying to backward an extra time.
SEEN
echo "as stated"
