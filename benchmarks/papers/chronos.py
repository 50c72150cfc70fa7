"""ChronosPipe's figures again, by theory, the cost model and simulation: 9 to 16.

Its figures are pictures: what stands beside ours is what its text says of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from benchmarks.papers.calibration import most_held, where_it_reaches
from benchmarks.papers.checks import Check, table
from benchmarks.papers.costs import GIB, estimated
from benchmarks.papers.formulas import idle_before_shallow, units_with_messages
from benchmarks.problems import GB, pipeline, stage_costs
from benchmarks.tables import head, line
from optpipe.model.problem import Problem
from optpipe.model.program import STAGE
from optpipe.model.records import one_for_all
from optpipe.transformer.estimate import Estimate
from optpipe.transformer.records import Recompute
from optpipe_solver import systems

UNIT = 1000  # bytes of a chunk's activation
LLAMA = "llama-2-70b"
DIVISION = {"pp": 8, "tp": 8, "sequence_parallel": False}  # section 6.1: inputs of column-parallel layers are whole
RUN = {"microbatch_size": 2, "recompute": "cheap"}
HBM = 32 * GB
MESSAGE = 0.104  # section 6.1: T_c, in units of a chunk's forward
ON_GPU = 2 / 3  # of the model state where the deep half's optimizer, two thirds of its state, is on the host
HALF, RECOMP, ALL, EVERYTHING = (
    "1F1B, half recomputed",
    "Chronos-Recomp",
    "ChronosPipe ALL",
    "1F1B, all recomputed",
)
NAMES = ("1F1B", HALF, EVERYTHING, "Chronos-Pipe", RECOMP, ALL)  # as the figures have them
DENSE = ("qwen2.5-32b", "palm-62b", "opt-66b")


def chronos() -> None:
    """Compare ChronosPipe's figures 9 to 16 with ours. The first table is 12, the second 15."""
    for text in (figure_12_table(), figure_15_table(), table(checks())):
        print(text, end="\n\n")


def checks() -> Iterator[Check]:
    """Every comparison."""
    for figure in (
        *(activations, largest, recomputations, sequences),
        *(models, messages, overlaps, budgets, idle),
    ):
        yield from figure()


def activations() -> Iterator[Check]:
    """Figure 9(a): activations of 48 layers on the first device."""
    found = _llama(48)
    for name, published in ((HALF, 10.6), ("Chronos-Pipe", 17.23), (RECOMP, 6.63)):
        share = of_1f1b(name)
        yield Check(
            "ChronosPipe, Figure 9(a)",
            f"{name}: activations",
            "GB",
            published,
            share * whole_bytes(found) / GB,
            f"{share:.2%} of the memory of 1F1B",
        )


def largest() -> Iterator[Check]:
    """Figure 9(b): the most layers whose state and activations take 32 GB; steps of 8 layers, with two chunks of 16.

    With Chronos-Offload the deep half's optimizer is on the host, so a third of that half's state stays (section 5.1).
    """
    published = {"1F1B": 40, HALF: 64, "Chronos-Pipe": 48, RECOMP: 80, ALL: 96}
    steps = {name: 8 if name.startswith("1F1B") else 16 for name in published}
    least = max(storage(_llama(layers), name) for name, layers in published.items()) / GIB
    most = min(storage(_llama(layers + steps[name]), name) for name, layers in published.items()) / GIB
    for name, layers in published.items():
        ours = max(n for n in range(steps[name], 160, steps[name]) if storage(_llama(n), name) <= HBM)
        note = f"any {least:.1f} to {most:.1f} GiB for state and activations give all five"
        yield Check("ChronosPipe, Figure 9(b)", f"{name}: largest model", "layers", layers, ours, note)


def _llama(layers: int) -> Estimate:
    return estimated(LLAMA, DIVISION, "A100", RUN, layers=layers)


def recomputations() -> Iterator[Check]:
    """Figure 10: storage and speed of GPT-3 175B, sequences of 16384 tokens, 32 micro-batches.

    Storage is that of 1F1B without recomputation over a method's, speed is over 1F1B that recomputes everything.
    """
    runs = ({"sequence": 16384, "recompute": recompute} for recompute in ("none", "cheap", "full"))
    plain, cheap, full = (estimated("gpt-3-175b", {"pp": 8, "tp": 8}, "A100", run, dropout=False) for run in runs)
    whole, source = storage(plain, "1F1B"), "ChronosPipe, Figure 10"
    for name, published, needs in (
        ("Megatron-Kwai", 1.27, storage(cheap, "1F1B")),
        ("Chronos-Pipe + Chronos-Recomp", 1.72, storage(plain, RECOMP)),
        (ALL, 2.22, storage(plain, ALL)),
    ):
        yield Check(source, f"{name}: less storage", "times", published, whole / needs, "without dropout")
    slow = units(EVERYTHING, 8, 32)
    yield Check(source, "Chronos-Pipe + Chronos-Recomp: faster", "times", 1.17, slow / units(RECOMP, 8, 32))
    sizes = [one.pieces[1].activation_bytes(one.run.recompute) for one in (cheap, full)]
    layers, state = plain.shape.layers, plain.devices[0].state / (plain.shape.layers / 8)

    def on_all_devices(each: float) -> float:
        return sum(most_layers(8 - s, each, whole / 1.76, state, sizes) for s in range(8))

    note = "with the storage of its 1.76; norms and GeLU, then whole layers; layers move"
    each = where_it_reaches(layers, on_all_devices, 4 * layers)
    yield Check(source, "AdaPipe: faster", "times", 1.26, 4 * layers / 8 / each, note)


def most_layers(held: int, units: float, budget: float, state: float, sizes: Sequence[float]) -> float:
    """How many layers fit into a stage that holds so many micro-batches, and takes so many units for one.

    F of a layer takes one unit, B and W two. `state` are bytes of a layer, `sizes` those of its activation, kept or
    recomputed; a hundredth of the layers may be recomputed, two, and so on.
    """
    kept, dropped = sizes
    shares = (hundredths / 100 for hundredths in range(101))
    return max(min(units / (3 + r), budget / (state + held * (kept + r * (dropped - kept)))) for r in shares)


def sequences() -> Iterator[Check]:
    """Figure 11: 32 layers on 4 devices, 32 micro-batches of each of 2 replicas."""
    source = "ChronosPipe, Figure 11"
    for name, other, published in (("Chronos-Pipe", "1F1B", 12.5), (RECOMP, HALF, 25.0)):
        less = 1 - of_1f1b(name, 4) / of_1f1b(other, 4)
        yield Check(source, f"{name} holds less than {other}", "%", published, 100 * less)
    slower = units("Chronos-Pipe", 4, 32) / units("1F1B", 4, 32) - 1
    yield Check(
        source, "Chronos-Pipe has less throughput", "%", 6, 100 * slower / (1 + slower), "the paper has 6 to 9 %"
    )
    run = RUN | {"sequence": 8192}
    found = estimated(LLAMA, DIVISION | {"pp": 4, "dp": 2, "zero": 1}, "A100", run, layers=32)
    note = "half of what interleaved 1F1B holds, 11 of 8; the paper's run ends without memory, so it needs at least 32"
    needs = found.devices[0].state + 11 / 8 / 2 * whole_bytes(found)
    yield Check(source, "interleaved 1F1B, half recomputed, 8192 tokens: needs", "GB", 32, needs / GB, note)


def models() -> Iterator[Check]:
    """Figure 12: three models, 64 micro-batches of 2 sequences on 8 devices."""
    source, found = "ChronosPipe, Figure 12", [_model(name) for name in DENSE]
    for what, small, large, least, most in (
        ("Chronos-Pipe + Chronos-Recomp: less storage than half recomputed", RECOMP, HALF, 1.21, 1.26),
        ("ChronosPipe ALL: less storage than half recomputed", ALL, HALF, 1.56, 1.58),
        ("Chronos-Pipe + Chronos-Recomp: less storage than all recomputed", RECOMP, EVERYTHING, 1.04, 1.10),
    ):
        ratios = [storage(one, large) / storage(one, small) for one in found]
        yield Check(source, f"{what}, least", "times", least, min(ratios), "sequences of 4096 tokens")
        yield Check(source, f"{what}, most", "times", most, max(ratios), "sequences of 4096 tokens")
    faster = units(EVERYTHING, 8, 64) / units(RECOMP, 8, 64)
    yield Check(source, "Chronos-Recomp: faster than all recomputed", "times", 1.15, faster)
    fits = sum(storage(one, RECOMP) <= HBM < storage(one, HALF) for one in found[1:])
    yield Check(source, "PaLM-62B and OPT-66B fit into 32 GB with it, not half recomputed", "models", 2, fits)


def figure_12_table() -> str:
    """GB of state and activations, and the ideal computation fraction: 1 - bubble - recomputation."""
    rows = [head(("schedule", *DENSE, "ideal computation"), "l" + "r" * (len(DENSE) + 1))]
    found = [_model(name) for name in DENSE]
    for name in NAMES:
        cells = [f"{storage(one, name) / GB:.1f}" for one in found]
        rows.append(line((name, *cells, f"{6 * 64 / units(name, 8, 64):.1%}")))
    return "\n".join(rows)


def messages() -> Iterator[Check]:
    """Figure 13: how much less of its time Chronos-Pipe computes than 1F1B; messages keep devices busy."""
    note = "by the formulas of section 4.1; messages that occupy both devices"
    less = 1 - units("1F1B", 4, 64) / units("Chronos-Pipe", 4, 64)
    what = "Chronos-Pipe computes less of its time than 1F1B"
    yield Check("ChronosPipe, Figure 13", what, "%", 6.0, 100 * less, note)


def overlaps() -> Iterator[Check]:
    """Figure 14: how much of gradients' way out and of the update hides, of 16 layers (Eq. 4 over T_step / 2p).

    What the CPU takes for a layer follows from the first of the three figures.
    """
    first = 0.4545
    step_ms = idle_ms(4, 4096) / first  # of two layers
    for devices, tokens, published in ((8, 4096, 94.55), (4, 8192, 100.0)):
        share = min(1.0, idle_ms(devices, tokens) / (step_ms * 4 / devices))
        what = f"Chronos-Offload, {devices} devices, {tokens} tokens: hidden"
        yield Check("ChronosPipe, Figure 14", what, "%", published, 100 * share, "T_step from 45.45 % on 4 devices")


def idle_ms(devices: int, tokens: int) -> float:
    """How long a device is idle before chunk 1's backwards (Eq. 4), of 16 layers."""
    run = RUN | {"sequence": tokens}
    found = estimated(LLAMA, DIVISION | {"pp": devices, "chunks": 2}, "A100", run, layers=16)
    layer = found.layers[1]
    backward = one_for_all(layer.backward_input_ms) + one_for_all(layer.backward_weight_ms)
    return idle_before_shallow(devices, 16 * backward)


def budgets() -> Iterator[Check]:
    """Figure 15: what is left of 1F1B's activations on 4 devices, without the one that is being recomputed."""
    source = "ChronosPipe, Figure 15"
    yield Check(source, "4 chunks, a quarter recomputed: left", "%", 43.75, 100 * left(4, 1))
    below = [left(v, r) < 1 - r / v for v in (2, 3, 4) for r in range(1, v)]
    what = "below 1F1B with as much recomputed"
    yield Check(source, what, "% of points", 100, 100 * sum(below) / len(below))


def figure_15_table() -> str:
    """What is left of 1F1B's activations by chunks a device, and how many of them are recomputed."""
    rows = [head(("chunks", "none", *(f"{r} recomputed" for r in (1, 2, 3))), "lrrrr")]
    for v in (2, 3, 4):
        rows.append(line((v, *(f"{left(v, r):.2%}" if r < v else "" for r in range(4)))))
    return "\n".join(rows)


@cache
def left(chunks: int, recomputed: int) -> float:
    """The share of 1F1B's activations that the fullest of 4 devices holds, without the one that is being recomputed."""
    method = f"chronos-recomp:recomputed={recomputed}" if recomputed else "chronos"
    held = most_held(systems.generate(method, _alike(4, chunks, 2.0, recompute_ms=1.0, checkpoint_bytes=0)))
    return (held / UNIT - bool(recomputed)) / (4 * chunks)


def idle() -> Iterator[Check]:
    """Figure 16: how much more idle time Chronos-Offload can use on 4 devices with more chunks."""
    for chunks, published in ((3, 50.0), (4, 50.0)):
        extra = 100 * (idle_units(4, chunks) / idle_units(4, 2) - 1)
        what = f"{chunks} chunks have more usable idle time than 2"
        note = "in ops of a chunk, behind the deepest chunk's last backward"
        yield Check("ChronosPipe, Figure 16", what, "%", published, extra, note)


@cache
def idle_units(devices: int, chunks: int) -> float:
    """How long a device of Chronos-Pipe is idle behind the last backward of its deepest chunk, F = B = W = 1.

    The least of all devices. With two chunks it is Eq. 4: (p - ⌈(2p - 3)/6⌉ - 1) backwards of a chunk.
    """
    timeline = systems.generate("chronos", _alike(devices, chunks, 1.0)).timeline
    least = []
    for d in range(devices):
        of_device = timeline.device == d
        over = timeline.end[of_device & (timeline.table[:, STAGE] == devices * (chunks - 1) + d)].max()
        later = of_device & (timeline.start >= over)
        least.append(timeline.end[of_device].max() - over - (timeline.end - timeline.start)[later].sum())
    return float(min(least))


def units(name: str, devices: int, microbatches: int) -> float:
    """How long an iteration takes in units of a chunk's forward, messages included (sections 4.1 and 4.2).

    With recomputation messages cost what they cost 1F1B.
    """
    plain = units_with_messages(devices, microbatches, MESSAGE, 2 if name == "Chronos-Pipe" else 1)
    further = {HALF: 1, EVERYTHING: 2}.get(name, 0) * (microbatches + devices - 1)
    if name in (RECOMP, ALL):  # 6p + 7(m - 1) for 6(m + p - 1)
        further = microbatches - 1
    return plain + further


def storage(found: Estimate, name: str) -> float:
    """The bytes of state and activations on the first device."""
    state, kept = found.devices[0].state, whole_bytes(found)
    if name == EVERYTHING:  # and the layer that is being recomputed
        layer = found.pieces[1]
        return state + whole_bytes(found, "full") + layer.activation_bytes("cheap") - layer.activation_bytes("full")
    return state * (ON_GPU if name == ALL else 1) + of_1f1b(name, found.parallelism.pp) * kept


def whole_bytes(found: Estimate, recompute: Recompute | None = None) -> float:
    """What 1F1B holds on the first device."""
    level = recompute or found.run.recompute
    return found.parallelism.pp * sum(found.pieces[i].activation_bytes(level) for i in found.stages[0])


@cache
def of_1f1b(name: str, devices: int = 8) -> float:
    """What the fullest device holds of what 1F1B holds, with half of the layers recomputed, if any are: half of each
    stage, or one of two chunks.

    The half stage that 1F1B is recomputing is not counted, as in section 4.2, which has 50 %, and in Figure 9(a), where
    it holds 8 / 13 of Chronos-Pipe's GB. Chronos-Recomp's chunk is: there it has 5 / 13.
    """
    method = {"1F1B": "1f1b", HALF: "1f1b-recompute", "Chronos-Pipe": "chronos"}.get(name, "chronos-recomp")
    chunks, kept = (1, 0.5) if method.startswith("1f1b") else (2, 0.0)
    problem = _alike(devices, chunks, 2.0, recompute_ms=1.0, checkpoint_bytes=round(UNIT * kept))
    held = most_held(systems.generate(method, problem)) / UNIT - kept * (name == HALF)
    return held / (devices * chunks)


def _model(name: str) -> Estimate:
    return estimated(name, DIVISION, "A100", RUN | {"sequence": 4096, "microbatches": 64})


def _alike(devices: int, chunks: int, each: float, **fields: Any) -> Problem:
    """Looped stages whose F, B and W take `each`, 8 micro-batches a device, and memory for all."""
    stage = stage_costs((each, each, each), UNIT) | fields
    return pipeline([stage] * (devices * chunks), 8 * devices, 8 * devices * chunks * UNIT, devices)
