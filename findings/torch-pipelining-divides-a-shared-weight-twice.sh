#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.pipelining: a parameter that two stages of one rank share, as embedding and head may where a
# V-shaped schedule places the first and the last stage together, has its gradient divided by the number of micro-batches once
# for each of the stages, and at different times. No error, no warning.
#
# Expected: one division, since the gradients of both stages sum up in one tensor as in plain training. Seen: the gradient of
# the shared weight is wrong with the default `scale_grads=True`, right with False and a division by hand; others are right in
# both.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/run.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble
from torch.nn import Embedding, Linear, Sequential
from torch.nn.functional import cross_entropy

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def model():
    torch.manual_seed(0)
    embedding, head = Embedding(8, 4), Linear(4, 8, bias=False)
    head.weight = embedding.weight
    return [Sequential(embedding, Linear(4, 4)), Sequential(Linear(4, 4), head)]


tokens, target = torch.arange(8), torch.arange(8).flip(0)
plain = model()
cross_entropy(Sequential(*plain)(tokens), target).backward()
for kind in ScheduleInterleaved1F1B, ScheduleZBVZeroBubble:
    for scale in True, False:
        modules = model()
        stages = [PipelineStage(module, s, 2, torch.device("cpu")) for s, module in enumerate(modules)]
        kind(stages, 4, loss_fn=cross_entropy, scale_grads=scale).step(tokens, target=target)
        grads = [(p.grad if scale else p.grad / 4, q.grad) for p, q in zip(
            Sequential(*modules).parameters(), Sequential(*plain).parameters(), strict=True)]
        right = ["right" if torch.allclose(*pair, rtol=1e-4, atol=1e-6) else "wrong" for pair in grads]
        print(f"{kind.__name__}, scale_grads={scale}: shared weight {right[0]}, others", *right[1:])
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/run.py" 2>/dev/null | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
ScheduleInterleaved1F1B, scale_grads=True: shared weight wrong, others right right right right
ScheduleInterleaved1F1B, scale_grads=False: shared weight right, others right right right right
ScheduleZBVZeroBubble, scale_grads=True: shared weight wrong, others right right right right
ScheduleZBVZeroBubble, scale_grads=False: shared weight right, others right right right right
SEEN
echo "as stated"
