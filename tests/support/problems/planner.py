"""A small question for the planner: six layers on four GPUs, with few choices."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from optpipe.transformer.presets import GPUS
from optpipe.transformer.records import Run, Transformer
from optpipe_solver import tuning as tuned
from optpipe_solver.planner.candidates import Question

SMALL = Transformer(layers=6, hidden=2048, ffn=8192, heads=2, vocabulary=64_000, sequence=2048)
RESERVED = GPUS["A100"].reserved_bytes


def question(memory_bytes: int = RESERVED + 3_200_000_000, **fields: object) -> Question:
    """Six layers on four GPUs, so little memory that activations decide."""
    gpu = GPUS["A100"].model_copy(update={"memory_bytes": memory_bytes, "gpus_per_node": 2})
    return Question.from_dict({"model": SMALL, "gpu": gpu, "gpus": 4, "batch": 8, "run": Run(microbatches=1)} | fields)


@contextmanager
def few_choices() -> Iterator[None]:
    """Micro-batches of one or two sequences, and two chunks at most."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuned, "MICROBATCH_SIZES", (1, 2))
        patch.setattr(tuned, "CHUNKS", 2)
        yield
