#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.checkpoint.state_dict: `get_optimizer_state_dict` of an optimizer that has made no step yet,
# as for a checkpoint at step 0, makes a step of its own: each AdamW state is left with step 1, in the optimizer and in what is
# saved. The first update is then a quarter smaller, by the bias corrections of step 2.
#
# Expected: reading a state changes nothing, and step 0 is saved as 0. Seen: a run that saves before its first step, or loads
# such a checkpoint, trains differently from one that does not. SGD is not affected. No warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/run.py" <<'PYTHON'
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict


def train(before=lambda model, optimizer: None):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    start = model.weight.detach().clone()
    before(model, optimizer)
    moved = []
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        moved.append(round((start - model.weight).mean().item(), 4))
    return moved


saved = {}


def save(model, optimizer):
    saved.update(get_optimizer_state_dict(model, optimizer))
    print("saved at step 0: step", saved["state"]["weight"]["step"].item())


def load(model, optimizer):
    set_optimizer_state_dict(model, optimizer, saved)


print("plain", train())
print("after a save", train(save))
print("after a load", train(load))
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/run.py" 2>/dev/null | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
plain [0.1, 0.2, 0.3]
saved at step 0: step 1.0
after a save [0.0744, 0.1603, 0.2512]
after a load [0.0939, 0.1896, 0.2866]
SEEN
echo "as stated"
