"""Shapes read from a `config.json`: those of presets, parameters as transformers counts them, windows, refusals."""

import itertools
import json
import sys
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING, MODEL_FOR_PRETRAINING_MAPPING

from optpipe import InputError
from optpipe.transformer.estimate import estimate
from optpipe.transformer.huggingface import read
from optpipe.transformer.presets import GPUS, MODELS
from optpipe.transformer.records import Parallelism, Run

LLAMA_CONFIG: dict[str, Any] = json.loads("""{
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
    "num_hidden_layers": 80, "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 4096,
    "tie_word_embeddings": false
}""")
MOE_CONFIG = LLAMA_CONFIG | json.loads("""{
    "model_type": "qwen3_moe", "num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 768,
    "decoder_sparse_step": 2
}""")
LATENT_CONFIG: dict[str, Any] = json.loads("""{
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "first_k_dense_replace": 3,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "tie_word_embeddings": false
}""")
STARCODER2_CONFIG: dict[str, Any] = json.loads("""{
    "model_type": "starcoder2", "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30,
    "num_attention_heads": 24, "num_key_value_heads": 2, "sliding_window": 4096, "vocab_size": 49152
}""")
GEMMA3_CONFIG: dict[str, Any] = json.loads("""{
    "model_type": "gemma3", "vision_config": {"model_type": "siglip"},
    "text_config": {
        "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504, "num_attention_heads": 32,
        "num_hidden_layers": 62, "num_key_value_heads": 16, "sliding_window": 1024
    }
}""")
OPT_CONFIG: dict[str, Any] = json.loads("""{
    "model_type": "opt", "word_embed_proj_dim": 512, "hidden_size": 1024, "ffn_dim": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "do_layer_norm_before": false
}""")


NEMOTRON = MODELS["nemotron-3-nano"]
KINDS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
NEMOTRON_CONFIG: dict[str, Any] = json.loads("""{
    "model_type": "nemotron_h", "hidden_size": 2688, "num_hidden_layers": 52, "num_attention_heads": 32,
    "head_dim": 128, "num_key_value_heads": 2, "intermediate_size": 1856, "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712, "n_routed_experts": 128, "num_experts_per_tok": 6,
    "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "vocab_size": 131072
}""") | {"layers_block_type": [KINDS[each] for each in NEMOTRON.parts]}
SUPER_CONFIG = (
    NEMOTRON_CONFIG
    | json.loads("""{
    "hidden_size": 4096, "num_hidden_layers": 88, "intermediate_size": 2688, "moe_intermediate_size": 2688,
    "moe_shared_expert_intermediate_size": 5376, "n_routed_experts": 512, "num_experts_per_tok": 22,
    "moe_latent_size": 1024, "mamba_num_heads": 128
}""")
    | {"layers_block_type": [KINDS[each] for each in MODELS["nemotron-3-super"].parts]}
)
GRANITE_CONFIG: dict[str, Any] = json.loads("""{
    "model_type": "granitemoehybrid", "hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_local_experts": 72, "num_experts_per_tok": 10, "intermediate_size": 768,
    "shared_intermediate_size": 1536, "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128,
    "mamba_n_groups": 1, "vocab_size": 100352, "tie_word_embeddings": true
}""") | {"layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)]}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (LLAMA_CONFIG, "llama-2-70b"),
        (LATENT_CONFIG | {"num_nextn_predict_layers": 1}, "deepseek-v3"),
        (NEMOTRON_CONFIG, "nemotron-3-nano"),
        (SUPER_CONFIG, "nemotron-3-super"),
        (GRANITE_CONFIG, "granite-4-h-small"),
        ({"model_type": "qwen3_next"}, "qwen3-next-80b-a3b"),
    ],
)
def test_a_config_says_what_the_preset_says(config, name):
    preset, shape = MODELS[name], read(json.dumps(config))
    own = {"name", "source", "sequence", "vectors", "modules", *(["query_groups"] if preset.kv_latent else [])}
    unused = {"ffn"} if preset.parts else set()  # no layer has an MLP
    assert shape.model_dump(exclude=own | unused) == preset.model_dump(exclude=own | unused)
    assert preset.kv_latent or shape.all_vectors == preset.all_vectors


def test_layers_with_experts_of_a_config():
    experts = read(json.dumps({"text_config": MOE_CONFIG}))
    assert [experts.parts_of(i) for i in range(4)] == ["*-", "*E", "*-", "*E"]
    assert read(json.dumps(MOE_CONFIG | {"mlp_only_layers": [1]})).parts[:4] == ("*-", "*-", "*-", "*E")
    assert (experts.experts, experts.experts_per_token, experts.expert_ffn) == (64, 4, 768)
    without = read(
        json.dumps(GRANITE_CONFIG | {"num_local_experts": 0, "num_experts_per_tok": 0})
    )  # as Granite 4 Micro
    assert (set(without.parts), without.ffn, without.gated) == ({"M-", "*-"}, 1536, True)


@pytest.mark.parametrize(
    ("config", "parameters", "left_out"),
    [
        (STARCODER2_CONFIG, 3_030_371_328, []),  # 3b: tied, biased
        ({"model_type": "cohere", "vocab_size": 256}, 32_885_776_384, []),  # tied, few norms
        (GEMMA3_CONFIG, 27_009_346_304, ["vision_config (siglip)"]),
        (
            LATENT_CONFIG | {"num_nextn_predict_layers": 1},
            671_026_404_352,
            [],
        ),
        (OPT_CONFIG, 331_196_416, []),  # 350m: projections, and no norm before the head
        ({"model_type": "gpt2"}, 124_439_808, []),
        (
            {"model_type": "gpt2", "architectures": ["GPT2ForSequenceClassification"]},
            124_439_808,
            ["the head of GPT2ForSequenceClassification: that of a causal language model is taken"],
        ),
        # What a terminal would obey.
        ({"model_type": "gpt2", "audio_config": {"model_type": "\x1b[31m"}}, 124_439_808, [r"audio_config (\x1b[31m)"]),
    ],
)
def test_parameters_of_a_config_and_what_is_left_out(config, parameters, left_out):
    shape = read(json.dumps(config))
    assert estimate(shape, Parallelism(), GPUS["H100"], Run(microbatches=1, sequence=512)).parameters == parameters
    assert list(shape.left_out) == left_out


@pytest.mark.parametrize(
    ("config", "full"),
    [
        (STARCODER2_CONFIG, []),
        ({"model_type": "gemma3_text", "num_hidden_layers": 13}, [5, 11]),
        ({"model_type": "gemma3_text", "num_hidden_layers": 4, "sliding_window_pattern": 2}, [1, 3]),
        (
            {"model_type": "qwen2", "num_hidden_layers": 4, "use_sliding_window": True, "max_window_layers": 3},
            [0, 1, 2],
        ),
        (
            {"model_type": "gpt_oss", "num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]},
            [0],
        ),
    ],
)
def test_layers_with_a_window(config, full):
    shape = read(json.dumps(config))
    assert shape.window > 0
    assert [i for i in range(shape.layers) if not shape.window_of(i)] == full
    for unused in ({"use_sliding_window": False, "sliding_window": 8}, {"sliding_window": None}):
        assert read(json.dumps(LLAMA_CONFIG | {"model_type": "qwen2"} | unused)).window == 0


# Of text and more: the outer config says whether weights are tied, that of the text, or none, depending on the type.
WRAPPERS = (
    "audioflamingo3 blip-2 deepseek_vl gemma3 got_ocr2 granite_speech internvl janus kimi_k25 lighton_ocr llava_next "
    "omniasr ovis2 qwen2_audio qwen3_asr voxtral"
)


@pytest.mark.parametrize("kind", WRAPPERS.split())
def test_parameters_of_a_language_model_in_another_are_those_it_has_there(kind):
    """Counted in the whole model on the meta device; what cannot be read is refused."""
    counts, refused = set(), 0
    for outer, inner in itertools.product((None, True, False), repeat=2):
        text = {"num_hidden_layers": 4} | ({} if inner is None else {"tie_word_embeddings": inner})
        config = {"model_type": kind, "text_config": text} | ({} if outer is None else {"tie_word_embeddings": outer})
        with torch.device("meta"):
            made = AutoConfig.for_model(**json.loads(json.dumps(config)))
            names = MODEL_FOR_MULTIMODAL_LM_MAPPING, MODEL_FOR_PRETRAINING_MAPPING
            model = next(each[type(made)] for each in names if type(made) in each)(made)
        text_parts = model.get_decoder(), model.get_output_embeddings()
        parameters = sum({id(each): each.numel() for part in text_parts for each in part.parameters()}.values())
        try:
            shape = read(json.dumps(config))
        except InputError:
            refused += 1
            continue
        assert estimate(shape, Parallelism(), GPUS["H100"], Run(microbatches=1, sequence=8)).parameters == parameters
        counts.add(parameters)
    assert counts
    assert refused == (kind == "ovis2") * 3  # untied, with a head of the outer config's width


# Types of transformers with a causal language model that are read, each by its defaults.
TYPES = (
    "apertus arcee bitnet bloom cohere cohere2 deepseek_v2 deepseek_v3 ernie4_5 ernie4_5_moe exaone4 falcon gemma "
    "gemma2 gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox gpt_oss gptj granite granitemoe helium llama "
    "ministral3 mistral mixtral mpt olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 "
    "qwen3_moe seed_oss smollm3 stablelm starcoder2 vaultgemma"
)


@pytest.mark.parametrize("kind", TYPES.split())
def test_parameters_are_those_of_transformers(kind):
    """`read` raises if they are not; here also of other numbers of layers."""
    config = {"model_type": kind, "num_experts_per_tok": 2}
    own_names = {"mpt": "n_layers", **dict.fromkeys(("bloom", "gpt2", "gpt_bigcode", "gptj"), "n_layer")}
    name = own_names.get(kind, "num_hidden_layers")
    four, eight = (read(json.dumps(config | {name: layers})) for layers in (4, 8))
    assert (four.layers, eight.layers) == (4, 8)
    assert four.vectors == eight.vectors


@pytest.mark.parametrize(
    ("kind", "first", "last", "every"),
    [
        ("qwen3", "model.embed_tokens", "model.norm lm_head", "model.rotary_emb"),
        ("gpt2", "transformer.wte transformer.wpe", "transformer.ln_f lm_head", ""),
        (
            "opt",
            "model.decoder.embed_tokens model.decoder.embed_positions",
            "model.decoder.final_layer_norm lm_head",
            "",
        ),
    ],
)
def test_modules_have_the_names_of_transformers(kind, first, last, every):
    names = read(json.dumps({"model_type": kind})).modules
    assert (names.first, names.last, names.every) == (tuple(first.split()), tuple(last.split()), tuple(every.split()))
    assert read(json.dumps({"text_config": {"model_type": kind}})).modules is None  # the whole model has others


def test_without_transformers_no_config_is_read(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"^config: transformers reads a config: pip install 'optpipe\[models\]'$"):
        read(json.dumps(LLAMA_CONFIG))


OTHERS = {
    "recurrent_gemma": "layers with attention have fewer norms: that is not modelled",
    "minimax": "its layers differ in more than experts: that is not modelled; optpipe profile --model measures",
    "llama4_text": "layer_types has 'chunked_attention': it is not modelled",
    "bert": "parameters would be modelled: it has other parts",
    "mamba": "num_attention_heads.*: it is not modelled",
    "t5": "transformers makes no causal language model of it: ",
    "jetmoe": "attention is not that of heads of 128",
    "longcat_flash": "has no list of 56 layers",
    "prophetnet": "models with an encoder are not modelled",
}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((json.dumps({"model_type": kind}), why) for kind, why in OTHERS.items()),
        ("[]", "a config is an object"),
        (json.dumps({**LLAMA_CONFIG, "model_type": "lama"}), "no causal language model of it.*lama"),
        (json.dumps({**LLAMA_CONFIG, "model_type": ["llama"]}), "no causal language model of it"),
        (json.dumps({"hidden_size": 64}), "no causal language model of it"),
        (json.dumps({**LLAMA_CONFIG, "vocab_size": None}), "vocab_size"),
        (json.dumps({**LLAMA_CONFIG, "hidden_size": "x"}), "hidden_size"),
        (json.dumps({**LLAMA_CONFIG, "num_attention_heads": 0}), "no causal language model of it"),
        (json.dumps({**LLAMA_CONFIG, "num_hidden_layers": 10**9}), "num_hidden_layers = 1000000000: at most 4000"),
        (json.dumps({"model_type": "gemma3", "text_config": [1]}), "no causal language model of it"),
        (json.dumps({"model_type": "gemma2", "layer_types": ["linear_attention"]}), "no causal language model|differ"),
        (json.dumps({**LLAMA_CONFIG, "num_key_value_heads": 7}), "query_groups = 7: must divide heads = 64"),
        (json.dumps({"model_type": "jamba"}), "mamba has a state for each channel: it is not modelled"),
    ],
)
def test_a_wrong_config_or_a_model_with_other_parts_is_one_sentence(text, message):
    with pytest.raises(InputError, match=message) as raised:
        read(text, "config.json")
    assert "\n" not in str(raised.value)
