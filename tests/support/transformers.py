"""Estimates of small and of published transformers."""

from typing import Any

from optpipe.transformer.estimate import Estimate, estimate
from optpipe.transformer.presets import GPUS
from optpipe.transformer.records import Parallelism, Run, Transformer
from optpipe.transformer.work import Piece

GPT = Transformer(layers=4, hidden=1024, ffn=4096, heads=16, vocabulary=50000, sequence=512, dropout=True)


def made(shape: Transformer = GPT, division: dict[str, Any] | None = None, gpu: str = "H100", **run: Any) -> Estimate:
    return estimate(shape, Parallelism(**division or {}), GPUS[gpu], Run(**{"microbatches": 8} | run))


def layer(shape: Transformer = GPT, division: dict[str, Any] | None = None, **run: Any) -> Piece:
    return made(shape, division, **run).pieces[1]
