"""`optpipe profile --model config.json`: what is measured is the model of transformers, cut. `make stacks` runs it."""

import json
import os
import subprocess
import sys
from collections import ChainMap
from pathlib import Path
from typing import Any

import pytest
import torch

from optpipe import Problem
from optpipe.errors import InputError
from optpipe_runtime import as_whole
from optpipe_runtime.profiles import BatchSizes, find_factory

pytestmark = pytest.mark.stacks
FIELDS: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}


def written(folder: Path, **fields: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(FIELDS | fields))
    return str(path)


@pytest.mark.parametrize("ranks", [1, 2, 5, 6])
@pytest.mark.parametrize(
    "fields",
    [
        {"tie_word_embeddings": True},
        {"dtype": "bfloat16"},
        {"model_type": "qwen3", "head_dim": 8, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
        {"model_type": "gemma3_text", "head_dim": 8},
        {"model_type": "mixtral", "num_local_experts": 4},
    ],
)
def test_stages_of_a_config_are_the_model(fields: dict[str, Any], ranks: int, tmp_path: Path) -> None:
    """Made stage by stage, and with as many ranks as layers, too; a tied parameter is that of the first stage."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = written(tmp_path, **fields)
    factory = find_factory(path, BatchSizes(2, 3))
    setups = [factory(rank, ranks) for rank in range(ranks)]
    whole = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    parts = [as_whole({0: setup.stages[rank]}).state_dict() for rank, setup in enumerate(setups)]
    for rank, setup in enumerate(setups):
        for name, own in setup.stages[rank].shared.items():
            with torch.no_grad():
                setup.stages[rank].get_parameter(own).copy_(parts[0][name])
    found = whole.load_state_dict(dict(ChainMap(*parts)), strict=False)
    assert found.unexpected_keys == []
    assert set(found.missing_keys) <= ({"lm_head.weight"} if whole.config.tie_word_embeddings else set())
    assert setups[0].inputs.shape == (6, 16)
    assert setups[0].name == f"{type(whole).__name__}, 3 x 16 tokens a micro-batch"
    logits = whole.train()(setups[0].inputs, use_cache=False).logits
    assert logits.dtype == getattr(torch, fields.get("dtype", "float32"))
    assert logits.std() > 0
    value = setups[0].inputs
    for rank, setup in enumerate(setups):
        assert torch.equal(setup.inputs, setup.targets)
        assert list(setup.placement) == list(range(ranks))
        value = setup.stages[rank](value)
    assert torch.equal(value, logits)
    assert setups[-1].loss_fn(logits, setups[0].targets).isfinite()


def test_a_config_is_profiled(tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    command = [sys.executable, "-m", "optpipe_cli", "profile", "--model", written(tmp_path), "-o", str(path)]
    command += ["--ranks", "2", "--microbatches", "4", "--activation-budget-bytes", "50000000", "--repeats", "1"]
    command += ["--microbatch-size", "2", "--sequence", "8"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    problem = Problem.load(path)
    assert problem.name == "LlamaForCausalLM, 2 x 8 tokens a micro-batch"
    assert problem.name in done.stdout
    assert [stage.device for stage in problem.stages] == [0, 1]
    assert problem.microbatches == 4
    for stage in problem.stages:
        assert min(stage.forward_ms, stage.backward_input_ms, stage.backward_weight_ms) > 0
        assert 0 < (stage.saved_for_weight_bytes or 0) < stage.activation_bytes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"config\.json is not JSON: Expecting"),
        pytest.param("[" * 10**5, r"config\.json: .*nested too deeply", id="too deep"),
        ("[]", r"config\.json: an object with fields such as model_type is expected$"),
        ('{"text_config": {}}', r"config\.json: an object with fields such as model_type is expected$"),
        ('{"model_type": ["llama"]}', r"config\.json: an object with fields such as model_type is expected$"),
        ('{"model_type": "lama"}', r"model_type = 'lama': transformers has no such model; did you mean llama\?$"),
        ('{"model_type": "t5"}', r"model_type = 't5': transformers has no causal language model of it$"),
        (json.dumps(FIELDS | {"hidden_size": "wide"}), r"config\.json: transformers does not make a model of it: "),
        ('{"model_type": "bloom"}', r"^sequence is missing: .*config\.json has no max_position_embeddings$"),
        ('{"model_type": "gpt2"}', r"^model is a GPT2LMHeadModel: .* needs a decoder with embed_tokens, layers, norm"),
    ],
)
def test_what_is_no_config_of_a_language_model(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as refused:
        find_factory(str(path), BatchSizes(2))(0, 2)
    assert "\n" not in str(refused.value)
