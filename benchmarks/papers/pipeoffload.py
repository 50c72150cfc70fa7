"""PipeOffload's figures again, by the cost model and simulation: 8 with 15, 9, 10 with 18, 11, 12 and 16.

Its figures are pictures: what stands beside ours is what its text says of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import ceil
from typing import NamedTuple

from benchmarks.papers.calibration import most_held
from benchmarks.papers.checks import Check, table
from benchmarks.papers.costs import estimated, estimated_offload_ratio
from benchmarks.problems import GB, pipeline, stage_costs
from benchmarks.tables import head, line
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.model.records import COMPUTE_MS, one_for_all
from optpipe.transformer.estimate import Estimate
from optpipe.transformer.presets import MODELS
from optpipe_solver import systems
from optpipe_solver.systems.pipeoffload import pipe_offload

UNIT = 1000  # bytes of a stage's activation
ROOMY = 2**50  # bytes, more than any schedule holds
A100 = {"flops": 220e12, "bytes_per_s": 15e9}  # figure 1
METHODS = ("1f1b", "interleaved", "gis", "gis-h", "po-h", "po-f")
RECOMPUTED = "1f1b-i-r"  # interleaved 1F1B that recomputes whole layers
FOUR, OTHERS = METHODS[2:], ("v-min", "v-half", RECOMPUTED)  # figure 12
SEQUENCES = (4096, 16384)  # the text has none but "large" ones


class Division(NamedTuple):
    """Table 2: devices of the pipeline, GPUs of each, and sequences of a batch, which are its micro-batches."""

    devices: int
    tp: int
    microbatches: int


# Layers and the two that are left out fill equally many stages on every device. 83.8B has 80 of them, which 32 devices
# cannot share evenly: here its 32 GPUs are 16 devices.
DIVISIONS = {
    "5.8b": Division(8, 1, 32),
    "10.5b": Division(8, 1, 64),
    "18.1b": Division(16, 1, 128),
    "42.9b": Division(32, 1, 256),
    "66.6b": Division(32, 1, 256),
    "83.8b": Division(16, 2, 256),
}
PURE, TENSOR = Division(32, 1, 256), Division(4, 8, 256)  # figure 11


class Outcome(NamedTuple):
    """What a method needs and reaches: GB of activations on the fullest device, ms of an iteration, its MFU."""

    gb: float
    ms: float
    mfu: float
    fits: bool


def pipeoffload() -> None:
    """Compare PipeOffload's figures with ours: 8 with 15, 9, 10 with 18, 11, 12, 16. The first table is 15, the second
    18."""
    print(figure_15())
    print()
    print(figure_18())
    print()
    print(table(checks()))


def checks() -> Iterator[Check]:
    """Every comparison."""
    for figure in (figure_8, figure_9, figure_10, figure_11, figure_12, figure_16):
        yield from figure()


def figure_15() -> str:
    """GB of activations and MFU; OOM where 80 GB do not suffice, SKIP where the paper's k is above 1 and so it has no
    PO-F."""
    rows = [head(("model", "tokens", "k", *METHODS), "l" + "r" * (len(METHODS) + 2))]
    for model, sequence in _runs():
        cells = []
        for method in METHODS:
            reached = outcome(method, model, sequence)
            cells.append(f"{reached.gb:.1f}, " + (f"{reached.mfu:.1%}" if reached.fits else "OOM"))
        k = ratio(model, sequence)
        cells[-1] += " (SKIP)" * (k > 1)
        rows.append(line((model, sequence, f"{k:.2f}", *cells)))
    return "\n".join(rows)


def figure_8() -> Iterator[Check]:
    """Activations and throughput of six models."""
    source = "PipeOffload, Figure 8"
    for method, most, published in (("gis-h", True, 50), ("po-h", False, 100 / 6)):
        shares = {run: outcome(method, *run).gb / outcome("interleaved", *run).gb for run in _runs()}
        model, sequence = (max if most else min)(shares, key=lambda run: shares[run])
        v = (MODELS[f"pipeoffload-{model}"].layers + 2) // DIVISIONS[model].devices
        formula = ((v + 1) / (2 * v) if most else (v + 2) / (8 * v)) / ((v + 1) / v)
        what = f"{method}: of the activations of 1F1B-I, at {'most' if most else 'least'}"
        note = f"{model}, {v} stages a device: by Table 1 {formula:.1%}" + f"; {ceil(v / 2)} of them leave" * (not most)
        yield Check(source, what, "%", published, 100 * shares[model, sequence], note)
    for fast, slow in (("gis", "interleaved"), ("po-h", "1f1b"), ("po-f", "1f1b")):
        runs = [run for run in _runs() if fast != "po-f" or ratio(*run) <= 1]
        faster = sum(outcome(fast, *run).ms < outcome(slow, *run).ms for run in runs)
        yield Check(source, f"{fast} faster than {slow}", "runs", len(runs), faster)


def figure_9() -> Iterator[Check]:
    """What is left of the peak where some of the stages leave."""
    for (d, v), leaving, left in (((8, 16), 8, 25), ((8, 2), 1, 25)):
        problem = looped(d, v)
        schedule = pipe_offload(problem, leaving)
        held, whole = (most_held(each) / UNIT for each in (schedule, pipe_offload(problem, 0)))
        gone = {"activation_bytes": 0, "saved_for_weight_bytes": 0, "offload_bytes": 0}
        away = {op.stage for program in schedule.programs for op in program.ops() if op.kind is Kind.O}
        stages = [stage.model_copy(update=gone if s in away else {}) for s, stage in enumerate(problem.stages)]
        stay = most_held(schedule.on(problem.replace(stages=stages))) / UNIT
        what = f"PO, {d} × {v}: peak with {leaving} of {v} stages offloaded"
        note = f"{held:g} of {whole:g} activations: {stay:g} of stages that stay, others while computed or sent"
        yield Check("PipeOffload, Figure 9", what, "% of none", left, 100 * held / whole, note)


def figure_10() -> Iterator[Check]:
    """The most that PO-F has in flight on a device, whatever v and d are."""
    most = max(in_flight("po-f", d, v) for d, v in _sizes())
    note = "one is computed, one leaves, one returns; k = 1"
    yield Check("PipeOffload, Figure 10", "PO-F: activations in flight, at most", "", 4, most, note)


def figure_18() -> str:
    """Activations in flight by the stages of a device and by devices, of up to 32 stages; k = 1."""
    rows = [head(("d × v", *METHODS[1:]), "l" + "r" * (len(METHODS) - 1))]
    for d, v in _sizes():
        rows.append(line((f"{d} × {v}", *(f"{in_flight(method, d, v):g}" for method in METHODS[1:]))))
    return "\n".join(rows)


def figure_11() -> Iterator[Check]:
    """32 stages by PO-F against interleaved 1F1B on 4 devices of 8 GPUs each."""
    runs = [(model, sequence) for model in ("42.9b", "66.6b") for sequence in (2048, *SEQUENCES)]
    found = [(outcome("po-f", *run, PURE), outcome("interleaved", *run, TENSOR)) for run in runs]
    gains = [100 * (tensor.ms / pure.ms - 1) for pure, tensor in found]
    source = "PipeOffload, Figure 11"
    for name, published, place in (("most", 19, gains.index(max(gains))), ("least", 12, gains.index(min(gains)))):
        model, sequence = runs[place]
        sent = sent_share(model, sequence)
        note = f"{model}, {sequence} tokens: messages within stages take {sent:.0%} of the time with tp 8"
        yield Check(source, f"PO-F faster than TP8 × PP4, the {name}", "%", published, gains[place], note)
    less = sum(pure.gb < tensor.gb for pure, tensor in found)
    yield Check(source, "PO-F holds less than TP8 × PP4", "runs", len(found), less)


def sent_share(model: str, sequence: int) -> float:
    """The share of an iteration of interleaved 1F1B in which a device of 8 GPUs sends within its stages."""
    found = on_devices(model, sequence, TENSOR, "interleaved")
    sent = sum(times.messages for times in found.device_times) / TENSOR.devices * TENSOR.microbatches
    return sent / outcome("interleaved", model, sequence, TENSOR).ms


def figure_12(model: str = "42.9b") -> Iterator[Check]:
    """Which methods no other one beats in both activations and throughput."""
    source = "PipeOffload, Figure 12"
    for sequence in SEQUENCES:
        found = {method: outcome(method, model, sequence) for method in (*FOUR, *OTHERS)}
        beaten = {
            method
            for method, own in found.items()
            if any(other.gb <= own.gb and other.mfu > own.mfu for other in found.values())
        }
        for whose, methods, behind in (("its four methods", FOUR, 0), ("the other three", OTHERS, 3)):
            points = (f"{method} {found[method].gb:.1f} GB {found[method].mfu:.1%}" for method in methods)
            count = len(methods) - behind
            own = len(beaten & set(methods)) if behind else len(set(methods) - beaten)
            what = f"{model}, {sequence} tokens: {whose}, {'beaten' if behind else 'on the frontier'}"
            yield Check(source, what, "", behind or count, own, ", ".join(points))


def figure_16() -> Iterator[Check]:
    """What it frees and costs to compute norms, GeLU and dropout again, of a layer of 10.5B."""
    source = "PipeOffload, Figure 16"
    for groups, case in ((8, "8 groups of queries, as in Table 2"), (40, "without groups, as in its 34 and 20·b·s·h")):
        saved, ms = list[int](), list[float]()
        for recompute in ("none", "cheap"):
            run = {"sequence": SEQUENCES[0], "recompute": recompute}
            layer = estimated("pipeoffload-10.5b", {"pp": 8}, "A100", run, query_groups=groups).layers[1]
            saved.append(one_for_all(layer.activation_bytes))
            ms.append(sum(one_for_all(getattr(layer, field)) for field in COMPUTE_MS))
        yield Check(source, "less of a layer's activation", "%", 40, 100 * (1 - saved[1] / saved[0]), case)
        yield Check(source, "slower", "%", 1, 100 * (ms[1] / ms[0] - 1), f"the paper has 1 to 2 %; {case}")


def ratio(model: str, sequence: int) -> float:
    """The paper's k (Eq. 1)."""
    return estimated_offload_ratio(MODELS[f"pipeoffload-{model}"].hidden, sequence, **A100)


@cache
def outcome(method: str, model: str, sequence: int, division: Division | None = None) -> Outcome:
    """The figures of a method, with memory for everything; `fits` says whether 80 GB would do."""
    division = division or DIVISIONS[model]
    found = on_devices(model, sequence, division, method)
    roomy = found.with_memory(ROOMY)
    schedule = systems.generate("interleaved" if method == RECOMPUTED else method, roomy.problem)
    peaks = [peak.bytes for peak in schedule.compiled.certificate.device]
    ms = schedule.makespan_ms + roomy.after_ms
    fits = all(peak <= memory.budget for peak, memory in zip(peaks, found.devices, strict=True))
    return Outcome(max(peaks) / GB, ms, roomy.utilization_in(ms), fits)


def on_devices(model: str, sequence: int, division: Division, method: str) -> Estimate:
    """A model on A100, with the stages that the method takes: one a device, two in a V, or as many as there are layers
    for."""
    layers = MODELS[f"pipeoffload-{model}"].layers
    chunks = {"1f1b": 1, "v-min": 2, "v-half": 2}.get(method, (layers + 2) // division.devices)
    each, over = divmod(layers + 2, chunks * division.devices)
    stages = None if over else (each - 1, *[each] * (chunks * division.devices - 2), each - 1)
    shape = "v" if method.startswith("v-") else "looped"
    divided = {"pp": division.devices, "tp": division.tp, "chunks": chunks, "shape": shape, "layers": stages}
    recompute = "full" if method == RECOMPUTED else "cheap"
    run = {"sequence": sequence, "microbatches": division.microbatches, "recompute": recompute}
    return estimated(f"pipeoffload-{model}", divided, "A100", run)


@cache
def in_flight(method: str, devices: int, chunks: int) -> float:
    """What the fullest device holds, in activations of a stage."""
    return most_held(systems.generate(method, looped(devices, chunks))) / UNIT


def looped(devices: int, chunks: int) -> Problem:
    """Stages that are alike, F = B = W, with enough micro-batches for a steady state, and k = 1."""
    stage = stage_costs((1.0, 1.0, 1.0), UNIT, transfer_ms=1.5)
    return pipeline([stage] * (devices * chunks), 4 * devices, 4 * devices * chunks * UNIT, devices)


def _runs() -> list[tuple[str, int]]:
    return [(model, sequence) for model in DIVISIONS for sequence in SEQUENCES]


def _sizes() -> list[tuple[int, int]]:
    """Devices and stages of each, up to 32 in all."""
    powers = [2**n for n in range(1, 6)]
    return [(d, v) for v in (2, 4, 8, 16) for d in powers if d * v <= powers[-1]]
