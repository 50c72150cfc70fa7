#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.pipelining: `pipeline()` of a model whose head is its embedding's weight makes stages in which
# the two are parameters of their own. Each gets its part of the gradient, so one step of an optimizer makes them differ. No error,
# no warning. The first stage, which has no head, has the head's weight among its parameters as well.
#
# Expected: an error, or a sum of the gradients, as other frameworks have for the first and the last stage.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/run.py" <<'PYTHON'
import torch
from torch.distributed.pipelining import SplitPoint, pipeline


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.block = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.block(self.embedding(tokens)))


torch.manual_seed(0)
model, tokens = Tied(), torch.arange(8).reshape(2, 4)
(model(tokens) ** 2).sum().backward()
whole = model.embedding.weight.grad.clone()
model.zero_grad()
pipe = pipeline(model, mb_args=(tokens,), split_spec={"block": SplitPoint.BEGINNING})
stages = [pipe.get_stage_module(s) for s in range(2)]
(stages[1](stages[0](tokens)) ** 2).sum().backward()
parts = [(s, name, p) for s, stage in enumerate(stages) for name, p in stage.named_parameters() if p.shape == (8, 4)]
for s, name, p in parts:
    print(f"stage {s} has {name},", "without a gradient" if p.grad is None else "with a gradient")
embedding, head = (p for _, _, p in parts if p.grad is not None)
print("the model's gradient is that of the embedding:", torch.allclose(whole, embedding.grad))
print("the model's gradient is their sum:", torch.allclose(whole, embedding.grad + head.grad, rtol=1e-4, atol=1e-6))
torch.optim.SGD([p for stage in stages for p in stage.parameters()], lr=0.1).step()
print("embedding and head equal after a step:", torch.equal(embedding, head))
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/run.py" 2>/dev/null | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
stage 0 has embedding.weight, with a gradient
stage 0 has head.weight, without a gradient
stage 1 has head.weight, with a gradient
the model's gradient is that of the embedding: False
the model's gradient is their sum: True
embedding and head equal after a step: False
SEEN
echo "as stated"
