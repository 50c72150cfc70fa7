#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.pipelining with a zero-bubble schedule: a stage whose input needs no gradient, because the
# stages before it are frozen, gets no gradients for its weights at all. So does a weight that reaches an output of its stage
# without meeting the input. No error, no warning. With ScheduleInterleaved1F1B the gradients are right.
#
# Expected: the gradients of plain training, as of the other schedules. Seen: `.grad` stays None, and the optimizer passes over
# these weights. Stages 0 and 1 of four are frozen, as in fine-tuning; stage 2 then trains with one schedule and not with the
# other.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/run.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.nn import Linear, Module, Parameter
from torch.nn.functional import mse_loss

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class Scaled(Module):  # sends a learned tensor on to the next stage
    def __init__(self):
        super().__init__()
        self.layer, self.scale = Linear(4, 4), Parameter(torch.ones(2, 4))

    def forward(self, x):
        return self.layer(x), self.scale * 2


class Sum(Module):
    def __init__(self):
        super().__init__()
        self.layer = Linear(4, 4)

    def forward(self, x, scale):
        return self.layer(x) * scale


def frozen():
    modules = [Linear(4, 4) for _ in range(4)]
    for module in modules[:2]:
        module.requires_grad_(False)
    return modules


def learned():
    return [Linear(4, 4), Scaled(), Sum()]


x, target = torch.ones(8, 4), torch.zeros(8, 4)
for make in frozen, learned:
    for kind in ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble:
        torch.manual_seed(0)
        modules = make()
        stages = [PipelineStage(m, s, len(modules), torch.device("cpu")) for s, m in enumerate(modules)]
        kind(stages, 4, loss_fn=mse_loss).step(x, target=target)
        named = [(f"{s}.{n}", p) for s, m in enumerate(modules) for n, p in m.named_parameters() if p.requires_grad]
        print(make.__name__, kind.__name__, "without a gradient:", *(n for n, p in named if p.grad is None))
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/run.py" 2>/dev/null | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
frozen ScheduleInterleaved1F1B without a gradient:
frozen ScheduleInterleavedZeroBubble without a gradient: 2.weight 2.bias
learned ScheduleInterleaved1F1B without a gradient:
learned ScheduleInterleavedZeroBubble without a gradient: 1.scale
SEEN
echo "as stated"
