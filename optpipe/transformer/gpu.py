"""`Gpu`: a data sheet, and the parameters of the cost model that are learned."""

from __future__ import annotations

from typing import Annotated, Self

import numpy as np
from pydantic import Field, model_validator

from optpipe.model.records import Bytes, Document, Items, Record
from optpipe.transformer.records import Count, Degree, Numbers, Precision, Recompute, Text

Speed = Annotated[float, Field(gt=0, le=1e21)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Time = Annotated[float, Field(ge=0, le=1e6)]
# What `calibrate` learns, with the relative standard deviation of each before anything is measured: of an assumption
# about a fraction 15 or 25 %, of the others a factor of 2 to 3.
PARAMETERS: dict[str, float] = {
    "matmul_fraction": 0.15,
    "matmul_depth": 0.7,
    "attention_fraction": 0.2,
    "memory_fraction": 0.15,
    "host_us": 1.0,
    "link_fraction": 0.25,
    "link_us": 1.0,
    "network_fraction": 0.25,
}


class Extent(Record):
    """The most tokens of a micro-batch and the most experts that iterations had on a GPU, and what was recomputed."""

    tokens: Numbers
    experts: Count
    recompute: Items[Recompute]

    def joined(self, other: Extent | None) -> Extent:
        """What the iterations of both had."""
        both = (self, other or self)
        tokens, experts = (max(getattr(each, name) for each in both) for name in ("tokens", "experts"))
        levels = dict.fromkeys(level for each in both for level in each.recompute)
        return Extent(tokens=tokens, experts=experts, recompute=tuple(levels))


class Gpu(Document):
    """A GPU's data sheet, and what of it a training reaches.

    Speeds are per second and, of links, in one direction. `flops` are dense, by precision. `reserved_bytes` is what the
    driver, communication libraries and the allocator's fragments take. `gpus_per_host_link` GPUs share a link to the
    host, and every GPU has a network card of `network_bytes_per_s`.

    The rest are the parameters of the cost model (docs/costs.md): the fractions that large matmuls, flash attention,
    passes over memory and links reach; `matmul_depth`, the depth at which a matmul reaches half of its fraction;
    `host_us`, what a kernel costs the host, Python and waiting included, so more than a launch; `link_us`, the latency
    of each step of a collective.

    `precision_fractions` are what matmuls of other precisions reach over `matmul_fraction`, which is that of 16 bits: a
    GPU whose power is the limit reaches more of its peak with fewer.

    `measured` is what the iterations had that the parameters were learned from, or compared with, None if unknown.

    `covariance` is that of the logarithms of `PARAMETERS`, in this order, None before anything was measured.
    `unexplained` is the standard deviation of the logarithm of measured over predicted iterations, outliers aside,
    beside what these parameters leave open.
    """

    WHAT = "gpu"

    name: Text = ""
    source: Text = ""
    memory_bytes: Bytes
    flops: Annotated[dict[Precision, Speed], Field(min_length=1)]
    memory_bytes_per_s: Speed
    link_bytes_per_s: Speed  # to other GPUs of the node
    network_bytes_per_s: Speed  # to other nodes
    host_bytes_per_s: Speed
    gpus_per_node: Degree = 8
    gpus_per_host_link: Degree = 1
    reserved_bytes: Bytes
    matmul_fraction: Fraction
    precision_fractions: dict[Precision, Annotated[float, Field(gt=0, le=10)]] = Field(default_factory=dict)
    matmul_depth: Time
    attention_fraction: Fraction
    memory_fraction: Fraction
    link_fraction: Fraction
    network_fraction: Fraction
    host_fraction: Fraction
    host_us: Time
    link_us: Time
    measured: Extent | None = None
    covariance: Items[Items[float]] | None = None
    unexplained: Annotated[float, Field(ge=0, le=10)] = 0.06  # as of vTrain's iterations (docs/costs.md)

    def fraction(self, precision: Precision) -> float:
        """How much of its peak large matmuls reach in this precision."""
        return self.matmul_fraction * self.precision_fractions.get(precision, 1.0)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        n = len(PARAMETERS)
        if self.covariance is not None and [len(row) for row in self.covariance] != [n] * n:
            raise ValueError(f"covariance: must have {n} rows of {n} numbers, one for each of {', '.join(PARAMETERS)}")
        matrix = np.eye(n) if self.covariance is None else np.array(self.covariance)
        if not np.allclose(matrix, matrix.T, rtol=1e-6) or np.linalg.eigvalsh(matrix).min() <= 0:
            raise ValueError("covariance: must be symmetric and positive definite")
        return self
