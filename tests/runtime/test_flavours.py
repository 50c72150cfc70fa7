"""`optpipe profile --model torchtitan:MODEL/FLAVOUR`: what is measured is the model of torchtitan, cut. `make stacks`
runs it."""

from __future__ import annotations

from collections import ChainMap
from importlib import import_module
from pathlib import Path

import pytest
import torch
from support.ranks.named import in_a_row, profiled

from optpipe.errors import InputError
from optpipe_runtime.factory import Sizes, find_factory

pytestmark = [pytest.mark.stacks, pytest.mark.filterwarnings("ignore:`torch.jit")]  # of torchtitan's import
LLAMA3 = "torchtitan:llama3/debugmodel"


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", ["llama3/debugmodel", "qwen3/debugmodel_moe", "deepseek_v3/debugmodel"])
@pytest.mark.filterwarnings("ignore:In CPU autocast")  # of their routers
def test_stages_of_a_flavour_are_the_model(name: str, ranks: int) -> None:
    from torchtitan.models.common.attention import ScaledDotProductAttention

    factory = find_factory(f"torchtitan:{name}", Sizes(2, 3, sequence=16))
    setups = [factory(rank, ranks) for rank in range(ranks)]
    model, flavour = name.split("/")
    config = import_module(f"torchtitan.models.{model}").model_registry(flavour).model
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    whole = config.build()
    whole.init_weights(buffer_device=torch.device("cpu"))
    for parameter in whole.parameters():
        parameter.data = parameter.bfloat16()
    whole.load_state_dict(dict(ChainMap(*(setup.stages[rank].state_dict() for rank, setup in enumerate(setups)))))
    tokens, named = setups[0].inputs, setups[0].kwargs
    assert tokens.shape == (6, 16)
    assert setups[0].name == f"{model} {flavour}, 3 x 16 tokens a micro-batch"
    logits = whole(tokens, **named)
    assert logits.dtype == torch.bfloat16
    assert torch.equal(in_a_row(setups, **named), logits)
    assert setups[-1].loss_fn(logits, setups[0].targets).isfinite()


def test_a_flavour_is_profiled(tmp_path: Path) -> None:
    problem = profiled(LLAMA3, tmp_path, "--sequence", "32")
    assert problem.name == "llama3 debugmodel, 1 x 32 tokens a micro-batch"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lama3/8B", r"torchtitan has no model 'lama3', but .*llama3.*; did you mean llama3\?$"),
        ("llama3/8b", r"llama3 has no flavour '8b', but debugmodel, 1B, .*; did you mean 8B\?$"),
        ("llama3", r"llama3 has no flavour '', but debugmodel"),
        ("llama3/1B", r" on 2 ranks: torchtitan: Weight tying is not supported with Pipeline Parallel\.$"),
        ("muse_glimmer/debugmodel", r"torchtitan cuts it in a way of its own, only models of pipeline_llm"),
        ("flux/flux-debug", r"torchtitan\.models\.flux cannot be imported: "),
    ],
)
def test_what_is_no_flavour_that_can_be_measured(name: str, message: str) -> None:
    with pytest.raises(InputError, match=f"^model = 'torchtitan:{name}'.*{message}"):
        find_factory(f"torchtitan:{name}", Sizes(2))(0, 2)


@pytest.mark.parametrize(
    ("module", "name"), [("models", "_supported_models"), ("distributed.pipeline_parallel", "_split_module")]
)
def test_another_torchtitan_is_refused(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(import_module(f"torchtitan.{module}"), name)
    with pytest.raises(InputError, match=rf"'{LLAMA3}': torchtitan\.{module} has no {name}: torchtitan 0\.3\.0 is exp"):
        find_factory(LLAMA3, Sizes(2))


def test_a_flavour_with_sequences_that_are_too_long_or_on_too_many_ranks() -> None:
    with pytest.raises(InputError, match=r"torchtitan: Training sequence length 200000 exceeds .* 131072\.$"):
        find_factory(LLAMA3, Sizes(2, sequence=200_000))(0, 2)
    with pytest.raises(InputError, match=r"on 9 ranks: torchtitan: Number of stages \(9\) cannot be greater than"):
        find_factory(LLAMA3, Sizes(2))(0, 9)
