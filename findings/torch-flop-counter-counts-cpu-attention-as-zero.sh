#!/usr/bin/env bash
# torch 2.13.0, FlopCounterMode on a CPU: scaled_dot_product_attention counts 0 operations, forward and backward, with and
# without a mask, as do an encoder layer in eval mode, grouped matmuls of experts and a matrix times a vector. No warning.
#
# Expected: 4 b h s^2 d for attention's forward, as on a GPU, or a word about operators without a formula. Seen: the same
# encoder layer counts 278,528 in train mode and 0 in eval mode, so a model profiled on a laptop looks cheaper than it is.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/run.py" <<'PYTHON'
import torch
from torch.nn.functional import grouped_mm, scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode


def count(what, compute, expected):
    with FlopCounterMode(display=False) as counter:
        compute()
    print(f"{what}: {counter.get_total_flops()} of {expected}")


q, k, v = (torch.randn(1, 8, 64, 32, requires_grad=True) for _ in range(3))
mask = torch.zeros(1, 1, 64, 64)
forward = 4 * 8 * 64 * 64 * 32
count("attention", lambda: scaled_dot_product_attention(q, k, v), forward)
count("attention with a mask", lambda: scaled_dot_product_attention(q, k, v, attn_mask=mask), forward)
count("attention and its backward", lambda: scaled_dot_product_attention(q, k, v).sum().backward(), "3 times that")
count("the same by matmuls", lambda: (q @ k.transpose(-1, -2)).softmax(-1) @ v, forward)

x, w = torch.randn(64, 32), torch.randn(32, 16)
experts, ends = torch.randn(4, 32, 16).bfloat16(), torch.tensor([16, 32, 48, 64], dtype=torch.int32)
count("matmul", lambda: x @ w, 2 * 64 * 32 * 16)
count("grouped matmul", lambda: grouped_mm(x.bfloat16(), experts, offs=ends), 2 * 64 * 32 * 16)
count("matrix times vector", lambda: x @ w[:, 0], 2 * 64 * 32)

layer, y = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), torch.randn(2, 8, 32)
products = 2 * 16 * (4 * 32 * 32 + 2 * 32 * 64) + 4 * 2 * 8 * 8 * 32
count("encoder layer, train", lambda: layer(y), products)
with torch.no_grad():
    count("encoder layer, eval", lambda: layer.eval()(y), products)
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/run.py" 2>/dev/null | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
attention: 0 of 4194304
attention with a mask: 0 of 4194304
attention and its backward: 0 of 3 times that
the same by matmuls: 4194304 of 4194304
matmul: 65536 of 65536
grouped matmul: 0 of 65536
matrix times vector: 0 of 4096
encoder layer, train: 278528 of 278528
encoder layer, eval: 0 of 278528
SEEN
echo "as stated"
