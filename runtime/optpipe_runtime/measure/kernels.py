"""Kernels that a GPU's parameters in the cost model are learned from: matmuls, passes over memory, attention, launches.

Links and the network are not measured here: they need more GPUs, and are learned from iterations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from optpipe.transformer.calibrate import NAMES, Observation, calibrate, covariance
from optpipe.transformer.gpu import Gpu
from optpipe.transformer.records import Parallelism, Precision, Run
from optpipe.transformer.times import Clock as Formulas
from optpipe.transformer.work import Matmul
from optpipe_runtime.memory.engines import Clock

MEASURED = ("matmul_fraction", "matmul_depth", "attention_fraction", "memory_fraction", "host_us")
VAGUE = 10.0  # standard deviation of a logarithm: before it is measured, a parameter may be anything
SLOW = 1e-4  # where a matmul's fraction begins: bytes decide of no kernel then, and all kernels depend on the fraction
AT_LEAST = 0.05  # alone, kernels are up to so much faster or slower than in a training
HEAD = 128  # width of an attention head
SMALL = 64  # numbers of a tensor whose kernel takes less time than it takes to launch it
BUSY = 8192, 4  # width and number of matmuls that take longer than it takes to launch all that is timed behind them


class Sizes(NamedTuple):
    """Of what is measured: widths and depths of matmuls, bytes of passes, tokens of attention, launches in a row."""

    widths: tuple[int, ...]
    depths: tuple[int, ...]
    passes: tuple[int, ...]
    tokens: tuple[int, ...]
    launches: int = 500
    repeats: int = 20


CUDA = Sizes((1024, 4096, 8192), (64, 128, 512, 2048, 8192), (2**26, 2**28, 2**30), (2048, 8192))
CPU = Sizes((128, 512), (16, 64, 256, 1024), (2**22, 2**24), (128, 256), repeats=5)


def measure(gpu: Gpu, device: torch.device, sizes: Sizes | None = None) -> Gpu:
    """Measure the parameters of `MEASURED` and their covariance on a device: CUDA, where matmuls have 16 bits, or a
    CPU, where they have 32. By default it takes a minute at most. `gpu` is the device's data sheet: fractions are of
    its figures. Links, network and what is left unexplained of an iteration stay as they are in it."""
    precision: Precision = "bf16" if device.type == "cuda" else "fp32"
    formulas = Formulas(gpu, Parallelism(), Run(microbatches=1, precision=precision))
    vague = [VAGUE**2 if name in MEASURED else 1e-12 for name in NAMES]
    learned = calibrate(
        gpu.model_copy(update={"covariance": np.diag(vague).tolist(), "matmul_fraction": SLOW}),
        list(_observations(formulas, device, sizes or (CUDA if device.type == "cuda" else CPU))),
    )
    before, after = covariance(gpu), covariance(learned)
    is_measured = np.array([name in MEASURED for name in NAMES])
    both = np.where(np.outer(is_measured, is_measured), after + AT_LEAST**2 * np.eye(len(NAMES)), 0.0)
    both += np.where(np.outer(~is_measured, ~is_measured), before, 0.0)
    return learned.model_copy(update={"covariance": tuple(map(tuple, both.tolist())), "unexplained": gpu.unexplained})


def _observations(formulas: Formulas, device: torch.device, sizes: Sizes) -> Iterator[Observation]:
    """Yield what was measured, with the cost model's formula for it."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    clock = Clock(device)
    ms_of = partial(_ms, clock, sizes.repeats, _busy(device))

    def on(gpu: Gpu) -> Formulas:
        return Formulas(gpu, formulas.parallelism, formulas.run)

    for width in sizes.widths:
        for depth in sizes.depths:
            a, b = (torch.randn(shape, device=device, dtype=dtype) for shape in ((width, depth), (depth, width)))
            matmul = Matmul(width, width, depth)
            ms = ms_of(lambda a=a, b=b: torch.matmul(a, b))  # type: ignore[misc]
            yield Observation(lambda gpu, matmul=matmul: on(gpu).matmul_ms(matmul), ms)  # type: ignore[misc]
    for nbytes in sizes.passes:
        x = torch.zeros(nbytes // dtype.itemsize, device=device, dtype=dtype)
        y = torch.empty_like(x)
        ms = ms_of(lambda x=x, y=y: torch.neg(x, out=y))  # type: ignore[misc]
        yield Observation(lambda gpu, size=2 * nbytes: on(gpu).pass_ms(size), ms)  # type: ignore[misc]
    for tokens in sizes.tokens:
        heads = 16
        q = torch.randn((1, heads, tokens, HEAD), device=device, dtype=dtype)
        operations = 4 * heads * HEAD * tokens**2 / 2  # a causal kernel skips half
        ms = ms_of(lambda q=q: scaled_dot_product_attention(q, q, q, is_causal=True))  # type: ignore[misc]
        yield Observation(lambda gpu, n=operations: on(gpu).flash_ms(n), ms)  # type: ignore[misc]
    small = torch.zeros(SMALL, device=device, dtype=dtype)
    ms = _launch_ms(clock, lambda: torch.neg(small, out=small), sizes.launches, sizes.repeats)
    yield Observation(lambda gpu: gpu.host_us / 1000, ms)


def _busy(device: torch.device) -> Callable[[], object]:
    """What keeps a GPU busy while the host launches what is timed; nothing for a CPU, which computes at once."""
    if device.type != "cuda":
        return lambda: None
    width, count = BUSY
    x = torch.zeros((width, width), device=device, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    return lambda: [torch.matmul(x, x, out=y) for _ in range(count)]


def _ms(clock: Clock, repeats: int, keep_busy: Callable[[], object], run: Callable[[], object]) -> float:
    """The shortest time of a call, after two that do not count: in longer ones other programs ran, too.

    All are launched while the GPU computes `keep_busy`, and so follow each other as in a training. Otherwise a short
    kernel would take as long as its launch."""
    for _ in range(2):
        run()
    keep_busy()
    marks = []
    for _ in range(repeats):
        start = clock.mark()
        run()
        marks.append((start, clock.mark()))
    clock.settle()
    return min(clock.ms(start, end) for start, end in marks)


def _launch_ms(clock: Clock, run: Callable[[], object], launches: int, repeats: int) -> float:
    """How long the host takes to launch a kernel, when it need not wait for the one before."""
    times = []
    for _ in range(repeats):
        clock.settle()
        start = time.perf_counter()
        for _ in range(launches):
            run()
        times.append((time.perf_counter() - start) * 1e3 / launches)
    return min(times)
