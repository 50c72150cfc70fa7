"""Models of transformers, as they come, and the example that trains one. Every type of language model is cut into
stages that equal it, or refused in a sentence. `make stacks ARGS=transformers-5.24.0` runs it; `python -m
support.causal_types` prints the table of types.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import tables
from support.causal_types import EQUAL, HEADS, LEFT_OUT, WRONG, rows
from support.ranks.cases import numbers
from support.ranks.models import MICROBATCHES, programs
from support.ranks.worker import Ranks
from torch import Tensor

from optpipe_runtime import Pipeline, stages_of

WORDS, LENGTH = 64, 16
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MORE: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 8, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "Mixtral": {"num_local_experts": 4},
}


def model(name: str, backend: str | None = None) -> Any:
    import transformers

    config = getattr(transformers, f"{name}Config")(**SIZES | MORE[name])
    torch.manual_seed(0)
    whole = getattr(transformers, f"{name}ForCausalLM")(config)
    for layer in whole.model.layers if backend else ():
        layer.compile(backend=backend)
    return whole


def data(step: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Tokens, and named arguments: sequences are filled up at their beginnings."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(WORDS, (2 * MICROBATCHES, LENGTH), generator=generator)
    begins = torch.randint(LENGTH // 2, (2 * MICROBATCHES, 1), generator=generator)
    mask = (torch.arange(LENGTH) >= begins).long()
    return tokens, {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def trained(
    name: str, placement: list[int], backend: str | None = None
) -> tuple[list[list[float] | None], dict[str, Any], list[str]]:
    """A step in each way: losses, gradients of the last, and whose gradients came at B; with layers that are compiled
    one by one by a backend."""
    whole = model(name, backend)
    stages, losses = stages_of(whole, placement), []

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = whole.loss_function(logits, labels, WORDS)
        return found

    with Pipeline(stages, placement, loss, MICROBATCHES) as pipe:
        for step, how in enumerate(("kept", "offloaded", "recomputed")):
            pipe.load(programs(placement, how))
            for stage in stages.values():
                stage.zero_grad()
            tokens, kwargs = data(step)
            losses.append(pipe.step(tokens, tokens, kwargs=kwargs).losses)
        at_b = [f"{s}.{name}" for s in stages for name in pipe.at_b[s]]
    return losses, numbers(stages), at_b


def plain(name: str, backend: str | None = None) -> tuple[list[list[float]], Any]:
    """The model's own loss, micro-batch by micro-batch."""
    whole, losses = model(name, backend), []
    for step in range(3):
        whole.zero_grad()
        tokens, kwargs = data(step)
        losses.append([])
        for j in range(MICROBATCHES):
            here = slice(2 * j, 2 * j + 2)
            named = {name: value[here] for name, value in kwargs.items()}
            loss = whole(input_ids=tokens[here], labels=tokens[here], use_cache=False, **named).loss
            torch.autograd.backward(loss / MICROBATCHES)
            losses[-1].append(loss.item())
    return losses, whole


ROOT = Path(__file__).parents[2]


@pytest.mark.stacks
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own
@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")
@pytest.mark.parametrize(
    ("name", "backend"), [("Llama", None), ("Qwen3", None), ("Mixtral", None), ("Llama", "aot_eager")]
)
def test_losses_are_those_of_the_model_itself(ranks: Ranks, name: str, backend: str | None) -> None:
    """With a mask and positions, to the bit, in stages of which one is the head alone; and the gradients. If layers are
    compiled one by one, only gradients of their norms come at B."""
    torch.set_num_threads(1)
    placement = [0, 1, 0]
    losses, whole = plain(name, backend)
    (found, gradients, at_b), (_, others, also) = ranks(trained, name=name, placement=placement, backend=backend)
    assert found == losses
    assert len([*at_b, *also]) == (8 if backend else 0)
    assert all("layernorm" in parameter for parameter in [*at_b, *also])
    tables.note(f"{name}{' compiled' if backend else ''}", ranks.world, "stages_of", 0.0)
    gradients = {key.split(".model.", 1)[1]: value for key, value in (gradients | others).items()}
    for key, parameter in whole.named_parameters():
        np.testing.assert_allclose(gradients[key], parameter.grad, rtol=1e-4, atol=1e-6, err_msg=key)


@pytest.mark.stacks
def test_the_example_learns() -> None:
    command = ["torch.distributed.run", "--nproc-per-node", "2", "examples/train_hf.py", "--steps", "12"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ran = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", ran.stdout, re.MULTILINE)]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.5


# All types of models


# No model of their default config: it needs other packages, or fields that only a real model has.
LEFT_OUT_TYPES = {
    "CausalLM": {"dbrx", "gemma3n", "gemma4_assistant", "musicgen", "musicgen_melody", "qwen4_exp", "qwen4_exp_text"},
    "SequenceClassification": {"esm", "layoutlmv2"},
}
MOST_ARE_CUT = {"CausalLM": 97, "SequenceClassification": 2}


@pytest.mark.stacks
@pytest.mark.parametrize("head", HEADS)
def test_there_is_no_fourth_answer(head: str) -> None:
    table = list(rows(head))
    assert not [row for row in table if row.answer == WRONG]
    assert {row.type for row in table if row.answer == LEFT_OUT} == LEFT_OUT_TYPES[head]
    assert sum(row.answer == EQUAL for row in table) >= MOST_ARE_CUT[head]
