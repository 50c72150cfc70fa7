"""What a plan chooses from: divisions of the model over GPUs, micro-batches, recomputation, layers of stages.

`Today` is what runs today, such as `tp 8, pp 4, 1f1b`: where a plan starts, and what it is compared with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import gcd
from typing import Annotated, Any, Literal

from pydantic import Field

from optpipe.errors import InputError, OptPipeError
from optpipe.model.placement import Shape, even_cuts
from optpipe.model.problem import MAX_MICROBATCHES
from optpipe.model.records import OFFLOAD, RECOMPUTE, Document
from optpipe.schedule import Schedule
from optpipe.text import distinct_sizes
from optpipe.transformer.estimate import Estimate, estimate, even_layers
from optpipe.transformer.gpu import Gpu
from optpipe.transformer.records import Parallelism, Recompute, Run, Transformer
from optpipe.transformer.work import LEVELS
from optpipe_solver import tuning
from optpipe_solver.planner.candidate import ROOMY, Candidate
from optpipe_solver.systems import SYSTEMS, generate

Stack = Literal["optpipe", "torch", "megatron"]
DEGREES = ("tp", "pp", "dp", "cp", "ep", "chunks", "sequences")  # sequences of one micro-batch
_PART = re.compile(rf"({'|'.join(DEGREES)})[ =]*([1-9][0-9]{{0,5}})")


class Question(Document):
    """What is to be planned.

    Attributes
    ----------
    gpus
        How many there are. All are used.
    batch
        The sequences of one optimizer step, on all GPUs together.
    run
        What holds for all candidates: sequence, precision, attention. Its micro-batches and its recomputation are
        chosen, whatever they are here.
    offload
        Whether activations may leave to the host.
    stack
        What trains. `torch` is torchtitan or NeMo AutoModel by a schedule's rows, without offload and recomputation by
        the schedule; `megatron` has 1F1B and interleaved 1F1B.
    """

    WHAT = "question"

    model: Transformer
    gpu: Gpu
    gpus: Annotated[int, Field(strict=True, ge=1, le=2**16)]
    batch: Annotated[int, Field(strict=True, ge=1, le=2**24)]
    run: Run
    offload: bool = True
    stack: Stack = "optpipe"

    @property
    def cannot(self) -> tuple[str, ...]:
        """The fields of stages that say what a schedule may not use."""
        if self.stack == "optpipe":
            return () if self.offload else OFFLOAD
        return (*OFFLOAD, *RECOMPUTE)

    @property
    def limit(self) -> str | None:
        """What the stack cannot do with this model, as a sentence."""
        if self.stack != "torch" or not self.model.tied:
            return None
        return (
            f"embedding and head of {self.model.name or 'the model'} are tied, which torchtitan and NeMo AutoModel "
            "refuse in a pipeline: only pp 1 is planned for them; stacks optpipe and megatron have pipelines for it"
        )


def candidates(question: Question) -> list[Candidate]:
    """Return all candidates, the lowest bound first.

    Raises
    ------
    InputError
        If no division suits the number of GPUs, the model and the batch.
    """
    every = [Candidate(estimated, question.cannot) for estimated in _estimates(question)]
    if every:
        return sorted(every, key=lambda candidate: (candidate.bound_ms, candidate.estimate.parallelism.stages))
    model, gpus = question.model, question.gpus
    any_batch = question.model_copy(update={"batch": gpus})  # every dp divides it
    replicas = sorted({division["dp"] for division in _divisions(any_batch)})
    limit = f"; {question.limit}" if question.limit else ""
    if replicas:
        raise InputError(
            f"batch = {question.batch}: {gpus} GPUs make {' or '.join(map(str, replicas))} replicas of "
            f"{model.name or 'the model'}, a multiple of {replicas[0]} sequences would be right{limit}"
        )
    raise InputError(
        f"gpus = {gpus}: cannot be divided into stages of {model.layers} layers, into tp of at most "
        f"{question.gpu.gpus_per_node} that divides {model.heads} heads, and replicas{limit}"
    )


def _estimates(question: Question) -> Iterator[Estimate]:
    """Yield every division with every micro-batch size and recomputation; each partition of the layers once."""
    model, gpu = question.model, question.gpu
    pieces: dict[tuple[Any, ...], Estimate] = {}
    balanced: dict[tuple[Any, ...], tuple[int, ...]] = {}
    for division in _divisions(question):
        tp, pp, dp, ep, cp, zero = division.values()
        replica_batch = question.batch // dp
        parallelisms = [
            Parallelism.from_dict(division | {"chunks": chunks, "shape": shape})
            for chunks, shape in _shapes(question, pp)
        ]
        least = pp if question.stack == "torch" else 1  # AutoModel refuses fewer micro-batches than ranks
        sizes = (
            size
            for size in tuning.MICROBATCH_SIZES
            if replica_batch % size == 0 and least <= replica_batch // size <= MAX_MICROBATCHES
            if gcd(size, cp) == 1  # else replicas of smaller micro-batches are better
        )
        for size in sizes:
            for recompute in _recomputations(question):
                chosen = {"microbatches": replica_batch // size, "microbatch_size": size, "recompute": recompute}
                run = question.run.model_copy(update=chosen)
                costs = tp, ep, cp, (dp, zero) if zero > 1 else None, size, recompute, pp == question.gpus
                if costs not in pieces:
                    pieces[costs] = estimate(model, parallelisms[0], gpu, run)
                for even in parallelisms:
                    estimated = pieces[costs].divided(even, run)
                    yield estimated
                    key = *costs[:-1], even.stages
                    if key not in balanced:  # so that the longest stage is as short as possible
                        cuts = list(even_cuts(estimated.layers, [ROOMY] * even.stages))
                        cuts[0] -= 1  # the embedding, and at the end the head, are no layers
                        cuts[-1] -= 1
                        balanced[key] = tuple(cuts)
                    if balanced[key] != even_layers(model.layers, even.stages):
                        yield estimated.divided(even.model_copy(update={"layers": balanced[key]}), run)


def _divisions(question: Question) -> Iterator[dict[str, int]]:
    """Yield tp, pp, dp, ep, cp and ZeRO's stage.

    Tensor parallelism stays within a node. Context parallelism gives each GPU two parts of a sequence, one from each
    end, so that causal attention takes all the same time; only flash attention can be divided so. The other stacks
    want parts of one length, with tensor parallelism, too.
    """
    model, gpu = question.model, question.gpu
    sequence = question.run.sequence or model.sequence or 1
    halves = sequence // 2 if question.run.attention == "flash" and sequence % 2 == 0 else 1
    for tp in (tp for tp in _divisors(gcd(question.gpus, model.heads)) if gpu.gpus_per_node % tp == 0):
        for cp in _divisors(gcd(question.gpus // tp, halves)):
            if question.stack != "optpipe" and sequence % (tp * (2 * cp if cp > 1 else 1)):
                continue
            for pp in _divisors(question.gpus // tp // cp):
                dp = question.gpus // tp // cp // pp
                if pp > 1 and question.limit:
                    continue
                if pp <= model.layers and question.batch % dp == 0 and max(pp, dp) <= tuning.MOST_DEGREE:
                    for ep in _divisors(gcd(dp * cp, model.experts)) if model.experts else (1,):
                        for zero in _zeros(question, pp, dp * cp):
                            yield {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "cp": cp, "zero": zero}


def _zeros(question: Question, pp: int, replicas: int) -> tuple[int, ...]:
    """The stages of ZeRO that the stack has: Megatron 1; torch without a pipeline FSDP, which is 3; our runtime 2."""
    if replicas == 1:
        return (0,)
    return {"megatron": (1,), "torch": (1, 3) if pp == 1 else (1,), "optpipe": (1, 2)}[question.stack]


def _shapes(question: Question, pp: int) -> Iterator[tuple[int, Shape]]:
    """Yield chunks and shapes. Of V-shaped ones torch places two, Megatron none."""
    yield 1, "looped"
    for chunks in range(2, tuning.CHUNKS + 1) if pp > 1 else ():
        if pp * chunks <= question.model.layers:
            yield chunks, "looped"
            if question.stack == "optpipe" or (question.stack == "torch" and chunks == 2):
                yield chunks, "v"


def _recomputations(question: Question) -> tuple[Recompute, ...]:
    """Flash attention has no scores that `selective` could leave out; `cheap` only our runtime may do."""
    left_out = {"selective"} if question.run.attention == "flash" or question.stack == "torch" else set()
    left_out |= {"cheap"} if question.stack != "optpipe" else set()
    return tuple(level for level in LEVELS if level not in left_out)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@dataclass(frozen=True)
class Today:
    """A division as far as it is given, and the published schedule that runs on it."""

    text: str
    degrees: Mapping[str, int]
    method: str = "1f1b"
    recompute: str = "none"

    @classmethod
    def read(cls, text: str) -> Today:
        """Read parts with commas between. Raises InputError for one that is none of them."""
        degrees: dict[str, int] = {}
        method, recompute = "1f1b", "none"
        for part in (part.strip().lower() for part in text.split(",")):
            if found := _PART.fullmatch(part):
                degrees[found[1]] = int(found[2])
            elif part in SYSTEMS:
                method = part
            elif part.startswith("recompute ") and part.split()[-1] in LEVELS:
                recompute = part.split()[-1]
            else:
                raise InputError(
                    f"today = {text!r}: {part!r} is neither a number of {', '.join(DEGREES)} such as pp 4, nor a "
                    f"published schedule such as 1f1b, nor recompute {', '.join(LEVELS)}"
                )
        return cls(text, degrees, method, recompute)

    def is_one(self, candidate: Candidate) -> bool:
        """Whether a candidate is divided so; what is not given is free, but for chunks and layers."""
        parallelism, run = candidate.estimate.parallelism, candidate.estimate.run
        has = {"sequences": run.microbatch_size, **parallelism.model_dump(include=set(DEGREES))}
        asked = dict(self.degrees)
        if self.method == "1f1b":
            asked.setdefault("chunks", 1)
        even = not parallelism.layers and parallelism.zero <= 1
        return even and run.recompute == self.recompute and all(has[name] == degree for name, degree in asked.items())


@dataclass(frozen=True)
class Running:
    """What runs today by the cost model: its iteration in ms, and what its fullest GPU needs in bytes."""

    candidate: Candidate
    schedule: Schedule
    used_bytes: int

    @property
    def iteration_ms(self) -> float:
        return self.candidate.with_step_end(self.schedule.makespan_ms)

    @property
    def fits(self) -> bool:
        return self.used_bytes <= self.candidate.estimate.gpu.memory_bytes


def running(today: Today, candidates: Sequence[Candidate]) -> Running:
    """The shortest iteration of what today can mean, if any fits the memory, else the one that needs least of it.

    Raises InputError if no candidate is divided so, or none has room for an activation and this schedule.
    """
    divided = [candidate for candidate in candidates if today.is_one(candidate)]
    if not divided:
        raise InputError(f"today = {today.text!r}: these GPUs, this batch and this model cannot be divided so")
    every = []
    for candidate in divided:
        with suppress(OptPipeError):  # no room for any activation, or not a schedule of these stages
            if SYSTEMS[today.method].placement(candidate.problem, "keep") is None:
                schedule = generate(today.method, candidate.problem)
                every.append(Running(candidate, schedule, max(candidate.used_bytes(schedule))))
    if every:
        return min(every, key=lambda each: (0, each.iteration_ms) if each.fits else (1, each.used_bytes))
    least = min(divided, key=lambda candidate: candidate.state_bytes)
    has = least.estimate.gpu.memory_bytes
    if least.state_bytes < has:
        raise InputError(f"today = {today.text!r}: {today.method} is not a schedule of {least}")
    held, whole = distinct_sizes(least.state_bytes, has)
    raise InputError(
        f"today = {today.text!r}: with {least}, a GPU holds {held} without any activation, margin included, and has "
        f"{whole}"
    )
