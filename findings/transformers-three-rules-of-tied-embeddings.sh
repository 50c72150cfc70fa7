#!/usr/bin/env bash
# transformers 5.24.0: whether a vision-language model shares its embedding with its head follows one of three rules, by type,
# from the same two fields `tie_word_embeddings`, that of the config and that of its text_config:
#   - either of them ties (llava, llava_onevision, qwen2_vl, qwen2_5_vl, glm4v);
#   - the outer one decides, and is False where it is left out (llava_next, idefics3, aria, qwen3_vl);
#   - the outer one decides, and is True where it is left out (internvl, mistral3, gemma3, paligemma, got_ocr2).
# So a text_config that says `true` or `false` is ignored without a word in most types.
#
# Expected: one rule, or that of the text model, whose weights are meant. Seen: the number of parameters cannot be computed from
# a config.json without knowing the type's own default. Columns: the outer field left out, false, true; within each the text
# config's left out, false, true; T: shared.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check transformers==5.24.0 torch==2.13.0 numpy==2.4.6
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - 2>/dev/null <<'PYTHON' | tee "$folder/seen"
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 64}
TYPES = "llava llava_onevision qwen2_vl qwen2_5_vl glm4v llava_next idefics3 aria qwen3_vl internvl mistral3 gemma3 paligemma"
for name in (*TYPES.split(), "got_ocr2"):
    kind, columns = CONFIG_MAPPING[name], ""
    text_type = kind().text_config.model_type
    for outer in None, False, True:
        for text in None, False, True:
            said = {} if outer is None else {"tie_word_embeddings": outer}
            said_inside = {} if text is None else {"tie_word_embeddings": text}
            config = kind(text_config={"model_type": text_type, **SMALL, **said_inside}, **said)
            with torch.device("meta"):
                model = AutoModelForImageTextToText.from_config(config)
            shared = model.get_output_embeddings().weight is model.get_input_embeddings().weight
            columns += "T" if shared else "-"
        columns += " "
    print(f"{name}: {columns.strip()}")
PYTHON
diff - "$folder/seen" <<'SEEN'
llava: --T --T TTT
llava_onevision: --T --T TTT
qwen2_vl: --T --T TTT
qwen2_5_vl: --T --T TTT
glm4v: --T --T TTT
llava_next: --- --- TTT
idefics3: --- --- TTT
aria: --- --- TTT
qwen3_vl: --- --- TTT
internvl: TTT --- TTT
mistral3: TTT --- TTT
gemma3: TTT --- TTT
paligemma: TTT --- TTT
got_ocr2: TTT --- TTT
SEEN
echo "as stated"
