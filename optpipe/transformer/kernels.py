"""Measured kernels, by shape, to learn a GPU's parameters from (`calibrate`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from optpipe.errors import InputError
from optpipe.transformer.calibrate import Observation
from optpipe.transformer.gpu import Gpu
from optpipe.transformer.records import Parallelism, Run
from optpipe.transformer.times import MS, SCORES_BACKWARD, Clock
from optpipe.transformer.work import Matmul

PASS_BYTES = 1e9  # of the pass over memory that a measured bandwidth stands for
RING_BYTES = 1e9  # that a GPU sends in a ring
RINGS = ("all_reduce", "all_gather", "reduce_scatter")


def read_kernels(text: str, what: str = "kernels") -> list[Observation]:
    """Read measured kernels of 16 bits, as MooreThreads/SimuMax writes them (`configs/system/*.json`).

    A kernel's name has its shape, its number the fraction of the peak that it reached: of `matmul` and `group_matmul`,
    and of attention (`sdp_fwd`, `sdp_bwd`), all of whose scores count there, in the backward 2.5 times. Of `bandwidth`
    the default counts, of `networks` what rings of a node's GPUs reach, without latencies, where there are any.

    Raises
    ------
    InputError
        If the text has no such form, or a kernel no such shape.
    """
    try:
        whole = json.loads(text)
        machine, networks = whole["accelerator"], whole.get("networks", {})
        found = [*_memory(machine["bandwidth"]["default"], what), *_kernels(machine["op"], what)]
        return found + [each for name in networks if "intra_node" in name for each in _rings(networks[name], what)]
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        expected = "expected SimuMax's accelerator with op and bandwidth"
        raise InputError(f"{what}: {expected}: {type(error).__name__} {str(error)[:100]}") from None


def _memory(bandwidth: Mapping[str, float], what: str) -> Iterator[Observation]:
    speed = _positive(bandwidth["gbps"], what) * 1e9 * _positive(bandwidth["efficient_factor"], what)
    yield Observation(lambda gpu: _clock(gpu).pass_ms(PASS_BYTES), PASS_BYTES / speed * MS)


def _rings(network: Mapping[str, Any], what: str) -> Iterator[Observation]:
    for op in RINGS:
        if reached := network["op"].get(op, {}).get("efficient_factor"):
            speed = _positive(network["bandwidth"]["gbps"], what) * 1e9 * _positive(reached, f"{what}, {op}")
            yield Observation(lambda gpu: _clock(gpu).links.ring_ms(RING_BYTES, 2, 1, 0), RING_BYTES / speed * MS)


def _kernels(ops: Mapping[str, Any], what: str) -> Iterator[Observation]:
    readers = {"matmul": _matmul, "group_matmul": _grouped, "sdp_fwd": _attention, "sdp_bwd": _attention_backward}
    for op, reader in readers.items():
        peak = _positive(ops[op]["tflops"], what) * 1e12
        for name, reached in ops[op]["accurate_efficient_factor"].items():
            operations, predict = reader(dict(word.split("=") for word in name.split(", ")))
            yield Observation(predict, operations / (peak * _positive(reached, f"{what}, {name}")) * MS)


Kernel = tuple[float, Callable[[Gpu], float]]  # its operations, as they are counted there, and what a GPU takes


def _matmul(shape: Mapping[str, str]) -> Kernel:
    b, m, k, n = (int(shape[name]) for name in "bmkn")
    matmul = Matmul(b * m, n, k)
    return matmul.operations, lambda gpu: _clock(gpu).matmul_ms(matmul)


def _grouped(shape: Mapping[str, str]) -> Kernel:
    copies, m, n, k = (int(shape[name]) for name in ("ng", "M", "N", "K"))
    forward = Matmul(m, n, k, copies)
    stages = {"fwd": forward, "bwd_grad_act": forward.input_gradient, "bwd_grad_w": forward.weight_gradient}
    matmul = stages[shape["stage"]]
    return matmul.operations, lambda gpu: _clock(gpu).matmul_ms(matmul, grouped=True)


def _attention(shape: Mapping[str, str]) -> Kernel:
    batch, sequence, heads = (int(shape[name]) for name in ("batch", "seq_len", "head_num"))
    operations = 2.0 * batch * sequence**2 * heads * (int(shape["qk_head_dim"]) + int(shape["v_head_dim"]))
    return operations, lambda gpu: _clock(gpu).flash_ms(operations / 2)  # later tokens' scores are left out


def _attention_backward(shape: Mapping[str, str]) -> Kernel:
    operations, forward_ms = _attention(shape)
    return SCORES_BACKWARD["flash"] * operations, lambda gpu: SCORES_BACKWARD["flash"] * forward_ms(gpu)


def _clock(gpu: Gpu) -> Clock:
    return Clock(gpu, Parallelism(), Run(microbatches=1))


def _positive(number: Any, what: str) -> float:
    if not isinstance(number, int | float) or not 0 < number < 1e9:
        raise InputError(f"{what}: {number!r}: expected a number above 0")
    return float(number)
