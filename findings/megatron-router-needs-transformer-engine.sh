#!/usr/bin/env bash
# megatron-core 0.16.1, moe_utils.py: names that an import from TransformerEngine would bind are used where it is not
# installed. So the router of every mixture of experts raises NameError in its first forward, also in float64, which does
# not use TransformerEngine, and `moe_permute_fusion=True` raises ImportError in the place of the sentence that
# TransformerConfig has for this case ("fused permutation is not available. Please install TE >= 2.1.0.").
#
# Expected: the router computes by torch, as its code has it for that case, and the config raises its ValueError. So does
# 0.19.2. Seen: NameError and ImportError.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check megatron-core==0.16.1 torch==2.13.0 numpy==2.4.6
cat > "$folder/run.py" <<'PYTHON'
import torch
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from megatron.core.transformer.transformer_config import TransformerConfig

for dtype in torch.float32, torch.float64:
    try:
        router_gating_linear(torch.ones(2, 8), torch.ones(4, 8), None, dtype)
    except NameError as error:
        print("router", dtype, error)
try:
    TransformerConfig(
        num_layers=2, hidden_size=8, num_attention_heads=2, num_moe_experts=2, moe_permute_fusion=True
    )
except Exception as error:
    print("config", type(error).__name__, str(error).split(" (")[0])
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/run.py" 2>/dev/null | grep -E "^(router|config)" | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
router torch.float32 name 'te_general_gemm' is not defined
router torch.float64 name 'te_general_gemm' is not defined
config ImportError cannot import name 'fused_permute' from 'megatron.core.transformer.moe.moe_utils'
SEEN
echo "as stated"
