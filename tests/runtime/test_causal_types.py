"""Every type of language model that transformers has is cut into stages that equal it, or refused in a sentence.

`make stacks ARGS=transformers-5.24.0` runs it; `python -m support.causal_types` prints the table.
"""

from __future__ import annotations

import pytest
from support.causal_types import EQUAL, HEADS, LEFT_OUT, WRONG, rows

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
