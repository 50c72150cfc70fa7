#!/usr/bin/env bash
# torch 2.13.0: `torch.func.functional_call` of a module with a checkpointed block gives wrong gradients, when backward runs
# after the call, as usual. The block is computed again with the module's own weights, not with those of the call. Shapes are
# the same, so the checkpoint's determinism check accepts it. Both kinds of checkpoint; the output is right.
#
# Expected: the gradients of the same call without a checkpoint, or an error. Seen: silently other gradients for the weights
# passed in (averages, perturbed or offloaded copies), and none at all with the reentrant kind.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/run.py" <<'PYTHON'
import torch
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint


class Block(torch.nn.Module):
    def __init__(self, how):
        super().__init__()
        self.first, self.second, self.how = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), how

    def compute(self, x):
        return self.second(torch.tanh(self.first(x)))

    def forward(self, x):
        return checkpoint(self.compute, x, use_reentrant=self.how == "reentrant") if self.how else self.compute(x)


expected = {}
for how in None, "not reentrant", "reentrant":
    torch.manual_seed(0)
    block = Block(how)
    weights = {n: (3 * p.detach()).requires_grad_() for n, p in block.named_parameters()}
    x = torch.ones(1, 2, requires_grad=True)
    output = functional_call(block, weights, (x,))
    output.sum().backward()
    seen = {"output": output, "input": x.grad} | {n: w.grad for n, w in weights.items()}
    expected = expected or seen
    said = {n: "none" if v is None else "right" if torch.allclose(v, expected[n]) else "wrong" for n, v in seen.items()}
    print(how or "no checkpoint", *(f"{n} {right}" for n, right in said.items()), sep="; ")
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/run.py" 2>/dev/null | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
no checkpoint; output right; input right; first.weight right; first.bias right; second.weight right; second.bias right
not reentrant; output right; input wrong; first.weight wrong; first.bias wrong; second.weight wrong; second.bias right
reentrant; output right; input wrong; first.weight none; first.bias none; second.weight none; second.bias none
SEEN
echo "as stated"
