#!/usr/bin/env bash
# torch 2.13.0, torch.autograd.graph: under saved_tensors_hooks, also with hooks that return what they get, and under
# save_on_cpu on a CPU, a weight that is changed in place between forward and backward is not noticed any more. The backward
# computes with the new weight. Without hooks it raises "modified by an inplace operation". A non-reentrant checkpoint does the
# same.
#
# Expected: the error, or the gradient of the forward's weight. Seen: a silent mixture of both. A tool that only counts saved
# activations by hooks thereby turns off the check that would find an optimizer step between a micro-batch's forward and
# backward, as in an asynchronous pipeline.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/run.py" <<'PYTHON'
import contextlib

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


def gradient(context, around=lambda f, x: f(x)):
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    x = torch.ones(2, requires_grad=True)
    with context:
        y = around(lambda x: (x * weight).sum(), x)
    weight.grad = torch.tensor([-9.0, -18.0])
    optimizer.step()  # the weight is [10, 20] now
    try:
        y.backward()
    except RuntimeError as error:
        return "raises, modified by an inplace operation" if "inplace operation" in str(error) else str(error)
    return x.grad.tolist()


print("no hooks:", gradient(contextlib.nullcontext()))
print("hooks that return what they get:", gradient(saved_tensors_hooks(lambda t: t, lambda t: t)))
print("save_on_cpu:", gradient(save_on_cpu()))
print("checkpoint:", gradient(contextlib.nullcontext(), lambda f, x: checkpoint(f, x, use_reentrant=False)))
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/run.py" 2>/dev/null | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
no hooks: raises, modified by an inplace operation
hooks that return what they get: [10.0, 20.0]
save_on_cpu: [10.0, 20.0]
checkpoint: [10.0, 20.0]
SEEN
echo "as stated"
