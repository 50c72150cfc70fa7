#!/usr/bin/env bash
# megatron-core 0.16.1, PipelineParallelLayerLayout: a layout of `--pipeline-model-parallel-layout` with an empty first
# stage and E in the second is accepted by `validate_layer_layout`, and so is one with L before an empty last stage. It
# asks only that E is the first letter of all and L the last. Which rank has embedding and loss is decided elsewhere, by
# the first and the last stage.
#
# Expected: refused, as a layout with a layer before E is. Seen: accepted, the embedding listed in stage 1. No warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check megatron-core==0.16.1 torch==2.13.0 numpy==2.4.6
cat > "$folder/run.py" <<'PYTHON'
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

for text in "|Ettt|tt|tL", "Ett|tt|ttL|", "tt|Et|tt|tL":
    layout = PipelineParallelLayerLayout.from_str(text, 4)
    try:
        layout.validate_layer_layout(num_layers=text.count("t"), mtp_num_layers=0)
        print(text, "accepted", [[kind.name for kind in stage] for rank in layout.layout for stage in rank])
    except AssertionError as error:
        print(text, error)
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/run.py" 2>/dev/null | grep "|" | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
|Ettt|tt|tL accepted [[], ['embedding', 'decoder', 'decoder', 'decoder'], ['decoder', 'decoder'], ['decoder', 'loss']]
Ett|tt|ttL| accepted [['embedding', 'decoder', 'decoder'], ['decoder', 'decoder'], ['decoder', 'decoder', 'loss'], []]
tt|Et|tt|tL The first layer must be embedding, but got LayerType.decoder
SEEN
echo "as stated"
