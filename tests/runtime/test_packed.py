"""docs/packed.md and its example: the diff is that of the examples, and the losses are those of a plain run."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest
from support.pages import DOCS
from support.ranks import scripts
from support.ranks.worker import Ranks

from optpipe_runtime.demo import reference, text
from optpipe_runtime.demo.gpt import Size

EXAMPLES = ["examples/train_gpt.py", "examples/train_packed.py"]
TEXTS = [(DOCS.parent / name).read_text(encoding="utf-8") for name in EXAMPLES]
STEPS = 3


def test_the_diff_in_the_docs_is_that_of_the_examples() -> None:
    diff = difflib.unified_diff(*map(str.splitlines, TEXTS), *EXAMPLES, n=1, lineterm="")
    assert "```diff\n" + "\n".join(diff) + "\n```\n" in (DOCS / "packed.md").read_text(encoding="utf-8")


def test_the_example_prints_the_losses_of_a_plain_run(ranks: Ranks, tmp_path: Path) -> None:
    said = ranks(scripts.run, text=TEXTS[1], folder=str(tmp_path), arguments=["--steps", str(STEPS)])
    size = Size(width=128, blocks=4, context=256)
    documents = text.documents(text.corpus(), size.context)
    plain = reference.trained(size, 2, [text.packed(documents, step, 8, 4) for step in range(STEPS)])
    losses = [float(loss) for loss in re.findall(r"step \d: loss (\S+)", "".join(said))]
    assert losses == pytest.approx(list(plain), abs=1e-4)
