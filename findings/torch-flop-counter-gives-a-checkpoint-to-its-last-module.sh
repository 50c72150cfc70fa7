#!/usr/bin/env bash
# torch 2.13.0, FlopCounterMode: with a non-reentrant checkpoint, operations of other modules are counted for the module in
# which the recomputation stops early, which it does by default. That module never counts as left, so what follows in the
# backward pass is its own, too. The total is right, the table by module is not.
#
# Expected: modules of equal size have equal counts, but for the recomputation of the last one, and the parts sum up to the
# whole. Seen: the parts sum up to more than the whole, and the last layer looks most expensive. Without early stop they are
# right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/run.py" <<'PYTHON'
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode


class Stage(torch.nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Linear(8, 8) for _ in range(3))
        self.checkpointed = checkpointed

    def compute(self, x):
        return self.c(self.b(self.a(x)))

    def forward(self, x):
        return checkpoint(self.compute, x, use_reentrant=False) if self.checkpointed else self.compute(x)


product = 2 * 4 * 8 * 8
for name, checkpointed, early in ("plain", False, True), ("early stop", True, True), ("no early stop", True, False):
    stage, x = Stage(checkpointed), torch.ones(4, 8, requires_grad=True)
    with FlopCounterMode(display=False) as counter, set_checkpoint_early_stop(early):
        stage(x).sum().backward()
    products = {k: sum(v.values()) // product for k, v in counter.get_flop_counts().items()}
    parts = {k: products[f"Stage.{k}"] for k in "abc"}
    print(f"{name}: products of all {products['Global']}, of the layers {parts}, sum {sum(parts.values())}")
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/run.py" 2>/dev/null | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
plain: products of all 9, of the layers {'a': 3, 'b': 3, 'c': 3}, sum 9
early stop: products of all 11, of the layers {'a': 4, 'b': 4, 'c': 5}, sum 13
no early stop: products of all 12, of the layers {'a': 4, 'b': 4, 'c': 4}, sum 12
SEEN
echo "as stated"
