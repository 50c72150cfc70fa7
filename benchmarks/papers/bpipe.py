"""BPipe's claim again: GPT-3 96B on 32 A100 and 134B on 48, each division by 1F1B and by BPipe, where they fit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import NamedTuple

from benchmarks.papers.checks import Check, table
from benchmarks.papers.costs import estimated
from benchmarks.tables import head, line
from optpipe.model.records import COMPUTE_MS, one_for_all
from optpipe.transformer.records import Attention, Recompute
from optpipe_solver.planner.candidate import Candidate
from optpipe_solver.systems import generate

GPUS = {"gpt-3-96b": 32, "gpt-3-134b": 48}
BATCH = 128  # sequences of an iteration; the announcement has none
METHODS = "1f1b", "bpipe"


class Configuration(NamedTuple):
    """One way to train a model, with ms of an iteration by each method, and whether it fits."""

    tp: int
    size: int
    recompute: Recompute
    ms: dict[str, float]
    fits: dict[str, bool]
    layer_ms: float  # of a sequence
    utilization: float  # by BPipe

    def __str__(self) -> str:
        return f"tp {self.tp}, size {self.size}, recompute {self.recompute}"


def bpipe() -> None:
    """Compare BPipe's gain over 1F1B with the predicted one; the first tables have every configuration."""
    for model in GPUS:
        print(head((model, "1F1B: ms", "BPipe: ms"), "lrr"))
        for each in configurations(model, "unfused"):
            print(line((each, *(f"{each.ms[method]:.0f}" if each.fits[method] else "OOM" for method in METHODS))))
        print()
    print(table(checks()))


def checks() -> Iterator[Check]:
    """1F1B's fastest and slowest configuration over BPipe's fastest, and the MFU with flash attention."""
    for model in GPUS:
        plain, balanced = (_fitting(model, "unfused", method) for method in METHODS)
        fastest = min(balanced, key=lambda each: each.ms["bpipe"])
        at_most = min(each.ms["1f1b"] for each in balanced)
        times = {each.size: each.layer_ms for each in balanced if (each.tp, each.recompute) == (4, "selective")}
        costs = " and ".join(f"{ms:.2f} ms (size {size})" for size, ms in times.items())
        for name, published, choose in (("fastest", 1.25, min), ("slowest", 2.17, max)):
            other = choose(plain, key=lambda each: each.ms["1f1b"])
            ours = other.ms["1f1b"] / fastest.ms["bpipe"]
            note = f"{other}, over {fastest}"
            yield Check("BPipe", f"{model}: faster than 1F1B's {name}", "times", published, ours, note)
            if name == "fastest":
                what = f"{model}: the same, evictions that take no time"
                note = f"a layer takes {costs} for a sequence with tp 4"
                yield Check("BPipe", what, "times", published, other.ms["1f1b"] / at_most, note)
        flash = max(_fitting(model, "flash", "bpipe"), key=lambda each: each.utilization)
        yield Check("BPipe", f"{model}: MFU with flash attention", "%", 59, 100 * flash.utilization, str(flash))


def _fitting(model: str, attention: Attention, method: str) -> list[Configuration]:
    return [each for each in configurations(model, attention) if each.fits[method]]


@cache
def configurations(model: str, attention: Attention) -> tuple[Configuration, ...]:
    """4 or 8 GPUs a stage, micro-batches of 1 to 8 sequences, and what is recomputed."""
    levels: tuple[Recompute, ...] = ("none", "full") if attention == "flash" else ("none", "selective", "full")
    choices = product((4, 8), (1, 2, 4, 8), levels)
    return tuple(each for choice in choices if (each := _configuration(model, attention, *choice)))


def _configuration(model: str, attention: Attention, tp: int, size: int, recompute: Recompute) -> Configuration | None:
    run = {"microbatches": BATCH // size, "microbatch_size": size, "recompute": recompute, "attention": attention}
    found = estimated(model, {"pp": GPUS[model] // tp, "tp": tp}, "A100", run)
    if min(memory.budget for memory in found.devices) <= 0:
        return None
    candidate = Candidate(found)
    schedules = {"1f1b": generate("1f1b", candidate.problem), "bpipe": generate("bpipe", candidate.evicting)}
    ms = {method: candidate.with_step_end(schedule.makespan_ms) for method, schedule in schedules.items()}
    fits = {method: schedule.compiled.certificate.fits for method, schedule in schedules.items()}
    layer = sum(one_for_all(getattr(found.layers[1], field)) for field in COMPUTE_MS) / size
    return Configuration(tp, size, recompute, ms, fits, layer, found.utilization_in(ms["bpipe"]))
