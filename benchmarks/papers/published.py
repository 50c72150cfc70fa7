"""What others measured, predicted; and models whose layers differ, in simulation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.papers import costs
from benchmarks.papers.calibration import most_held, where_it_reaches
from benchmarks.papers.checks import Check, table
from benchmarks.papers.costs import AT_ONCE, estimated
from benchmarks.problems import Times, all_kept, pipeline, stage_costs, with_budget
from benchmarks.results_file import KeepOptions, Results, ResultsPath
from benchmarks.tables import head, line, text
from optpipe.anytime import solve
from optpipe.model.placement import Placement, together
from optpipe.model.problem import Problem
from optpipe.model.records import StageCosts
from optpipe.options import SolveOptions
from optpipe.transformer.times import SCORES_BACKWARD
from optpipe_cli.options import Options
from optpipe_cli.output import waiting
from optpipe_solver import systems

GEMMA_LAYER, GEMMA_HEAD = (1.0, 1.65, 0.22), (5.72, 1.21, 0.58)  # F, B, W over a layer's F


@dataclass(frozen=True)
class Uneven:
    """A model whose layers differ. Times in ms, all within the memory of interleaved 1F1B with an even split.

    `even_ms` is that schedule, `partitioned_ms` interleaved 1F1B on the most even partition by time, `ours_ms` the
    search for partition and schedule.
    """

    model: str
    even_ms: float
    partitioned_ms: float | None
    ours_ms: float | None
    bound_ms: float | None
    stages: str

    @property
    def speedup(self) -> float | None:
        return self.even_ms / self.ours_ms if self.ours_ms else None


def published(*, options: Options[KeepOptions] = KeepOptions(), results: ResultsPath = None) -> None:
    """Predict what others measured. Then search partition and schedule of models whose layers differ, against
    interleaved 1F1B with an even split."""
    kept = Results(results, "published", ("model",), options)
    print(table(predictions()))
    columns = ("model", "even split", "balanced split", "ours", "bound", "speed-up", "stages")
    print("\n" + head(columns, "lrrrrrl"))
    for model, problem in uneven().items():
        with waiting(model):
            row = Uneven(**(kept.find(model) or kept.add(asdict(_searched(model, problem, options)))))
        lengths = (row.even_ms, row.partitioned_ms, row.ours_ms, row.bound_ms)
        shown = (text(ms, ".5g") for ms in lengths)
        print(line((row.model, *shown, text(row.speedup, ".2f"), row.stages)))


def predictions() -> Iterator[Check]:
    """Every measurement, and what we say of it."""
    yield from primus()
    yield from zero_bubble()
    yield from gemma()
    yield from packed()


def primus() -> Iterator[Check]:
    """A trace of AMD's Primus: eight ranks, one chunk, 16 micro-batches; medians of F and of the fused backward."""
    forward = (57.81, 58.50, 59.44, 60.70, 60.90, 62.12, 61.59, 66.98)
    backward = (70.22, 69.71, 70.99, 68.82, 70.02, 70.18, 69.23, 75.18)
    times = [(f, b / 2, b / 2) for f, b in zip(forward, backward, strict=True)]
    measured, steady = 3253.6, systems.generate("1f1b", all_kept(times, 16))

    def with_messages(p2p_ms: float) -> float:
        return steady.on(steady.problem.replace(p2p_ms=p2p_ms)).makespan_ms

    rest = where_it_reaches(measured, with_messages, measured)
    note = f"messages take no time; {rest:.2f} ms each would explain the rest"
    yield Check("Primus trace", "an iteration of 1F1B, 8 ranks", "ms", measured, with_messages(0.0), note)


def zero_bubble() -> Iterator[Check]:
    """Zero Bubble's four cost tables: all work of a stage, by the cost model."""
    each = costs.zero_bubble()
    for whole in zip(each, each, each, strict=True):  # F, B and W of a model
        told, ours = sum(check.published for check in whole), sum(check.ours for check in whole)
        first = whole[0]
        yield Check(first.source, f"{first.what} + B + W", first.unit, told, ours, first.note)


def gemma() -> Iterator[Check]:
    """Four stages of a model with a vocabulary of 256,000: the backward from the forward and the layers' ratios."""
    forward, backward = (48.6, 47.3, 47.4, 99.4), (92.8, 89.6, 88.6, 125.9)
    layers = sum(forward[1:3]) / 2  # of every stage, which has as many layers as the others
    a_layer = (forward[3] - layers) / GEMMA_HEAD[0]
    again = sum(GEMMA_LAYER[1:]) / GEMMA_LAYER[0]
    note = "from the stage's own F"
    for s in (0, 1, 2):
        yield Check("Gemma's layer ratios", f"stage {s}: B + W", "ms", backward[s], forward[s] * again, note)
    ours = layers * again + a_layer * sum(GEMMA_HEAD[1:])
    note = f"its F tells {a_layer:.2f} ms a layer, the other stages {layers / a_layer:.2f} layers each"
    yield Check("Gemma's layer ratios", "stage 3, with the head: B + W", "ms", backward[3], ours, note)


def packed() -> Iterator[Check]:
    """Documents of different lengths packed into micro-batches of the same size, 7B Llama: the backward from F.

    What F takes for any lengths has a backward of twice the time, what grows with their squares that of attention.
    """
    forward = (196.3, 182.6, 179.7, 266.3, 263.2, 188.5, 179.8, 198.6)
    backward = (400.5, 376.6, 366.9, 612.5, 612.0, 406.7, 388.0, 416.4)
    alike = 168.9  # of F, whatever the lengths
    ours = [2 * alike + SCORES_BACKWARD["flash"] * (f - alike) for f in forward]
    note = "from F of the same micro-batch"
    yield Check("packed documents", "one step's 8 micro-batches: B + W", "ms", sum(backward), sum(ours), note)
    for which, j in (("lightest", forward.index(min(forward))), ("heaviest", forward.index(max(forward)))):
        yield Check("packed documents", f"the {which} micro-batch: B + W", "ms", backward[j], ours[j], note)


def uneven() -> dict[str, Problem]:
    """Models whose layers differ, two chunks a device with the same number of layers each."""
    rest = {"optimizer_bytes": 8, "gradient_bytes": 2, "microbatches": 16}
    experts: dict[str, Any] = {"ffn": 6144, "vocabulary": 151936, "layers": 32, "expert_every": 2}
    mixed = estimated("qwen3-30b-a3b", {"pp": 4, "dp": 8, "ep": 8, "zero": 1}, "H200", rest, AT_ONCE, **experts)
    dense = estimated(
        "qwen3-30b-a3b", {"pp": 4, "dp": 8, "ep": 8, "zero": 1}, "H200", rest, AT_ONCE, layers=32, dense_layers=16
    )
    gemma = [GEMMA_LAYER] * 32 + [GEMMA_HEAD]
    return {
        "Gemma's ratios, 32 layers and the head, 4 × 16": even(_layers(gemma), 4, 16),
        "Gemma's ratios, 32 layers and the head, 8 × 32": even(_layers(gemma), 8, 32),
        "every second layer with experts, 32 layers, 4 × 16": even(mixed.problem.layers or (), 4, 16),
        "16 dense layers, then 16 with experts, 4 × 16": even(dense.problem.layers or (), 4, 16),
    }


def even(layers: Sequence[Any], devices: int, microbatches: int, chunks: int = 2) -> Problem:
    """A problem of these layers with as many in every stage, and room for what interleaved 1F1B holds there.

    What stands around the layers that all stages share out evenly goes to the first or the last stage.
    """
    stage_count = devices * chunks
    count, around = divmod(len(layers), stage_count)
    sizes = [count] * stage_count
    first = around // 2  # an embedding; a head alone is the last stage's
    sizes[0], sizes[-1] = count + first, count + around - first
    starts = [sum(sizes[:s]) for s in range(stage_count)]
    stages = [together(layers[start : start + size]) for start, size in zip(starts, sizes, strict=True)]
    most = sum(stage["activation_bytes"] for stage in stages) * microbatches
    ample = pipeline(stages, microbatches, most, devices, layers=tuple(layers))
    return with_budget(ample, most_held(systems.generate("interleaved", ample)))


def _layers(times: Sequence[Times]) -> list[StageCosts]:
    """Layers that save the same; a head saves no more, as its loss is computed piece by piece."""
    return [StageCosts(**stage_costs(each, 1000)) for each in times]


def _searched(model: str, problem: Problem, options: SolveOptions) -> Uneven:
    result = solve(problem, **options.model_copy(update={"placements": "all"}).arguments())
    placement = result.schedule.placement if result.schedule else None
    return Uneven(
        model,
        systems.generate("interleaved", problem).makespan_ms,
        _partitioned(problem),
        result.makespan_ms,
        result.lower_bound_ms,
        str(placement or "as given"),
    )


def _partitioned(problem: Problem) -> float | None:
    """Interleaved 1F1B on the most even partition by time; None if it does not fit."""
    placed = Placement.balanced(problem, 2).apply(problem)
    schedule = systems.generate("interleaved", placed)
    return None if schedule.compiled.complaints else schedule.makespan_ms
