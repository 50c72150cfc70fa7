#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.pipelining: the stages that `pipeline()` makes of a model stay in the mode in which it was
# traced. `eval()` of a stage's module sets `training` to False and changes nothing else: dropout drops, and a BatchNorm takes
# and keeps statistics of the batch. `train()` of a model traced in eval mode has no dropout. No error, no warning.
#
# Expected: the mode is followed, or refused, as the module of torch.export refuses it with NotImplementedError. Seen: an
# evaluation of the pipeline is noisy and changes the model, though the flags say otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/run.py" <<'PYTHON'
import torch
from torch.distributed.pipelining import SplitPoint, pipeline


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop = torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)
        self.second, self.norm = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.second(self.drop(self.first(x))))


torch.manual_seed(0)
x = torch.randn(64, 4)
for traced in True, False:
    model = Model().train(traced)
    pipe = pipeline(model, mb_args=(x,), split_spec={"second": SplitPoint.BEGINNING})
    first, second = (pipe.get_stage_module(s).train(not traced) for s in range(2))
    flags = {m.training for stage in (first, second) for m in stage.modules()}
    seen = f"traced with training={traced}, now {flags}: dropout {(first(x) == 0).any().item()}"
    before = second.get_buffer("norm.running_mean").clone()
    second(x)
    print(f"{seen}, statistics changed {not torch.equal(before, second.get_buffer('norm.running_mean'))}")
try:
    torch.export.export(Model(), (x,)).module().eval()
except NotImplementedError as error:
    print("torch.export:", type(error).__name__)
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/run.py" 2>/dev/null | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
traced with training=True, now {False}: dropout True, statistics changed True
traced with training=False, now {True}: dropout False, statistics changed False
torch.export: NotImplementedError
SEEN
echo "as stated"
