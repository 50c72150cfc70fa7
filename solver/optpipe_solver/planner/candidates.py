"""What a plan chooses from: divisions of the model over GPUs, micro-batches, recomputation, layers of stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import permutations
from math import gcd
from statistics import mean
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from optpipe.errors import InputError
from optpipe.formats.stacks import STACKS
from optpipe.model.ops import Kind
from optpipe.model.placement import SHAPES, Shape, even_cuts
from optpipe.model.problem import MAX_MICROBATCHES
from optpipe.model.records import Document
from optpipe.transformer.estimate import Estimate, estimate, even_layers
from optpipe.transformer.gpu import Gpu
from optpipe.transformer.records import Parallelism, Recompute, Run, Transformer
from optpipe.transformer.work import LEVELS
from optpipe_solver import tuning
from optpipe_solver.planner import settings
from optpipe_solver.planner.candidate import ROOMY, Candidate

Stack = Literal["optpipe", "torch", "megatron"]
# What a stack does unless another is chosen: Megatron-LM as its configurations for speed have it.
BY_DEFAULT: dict[str, dict[str, Any]] = {"megatron": {"fused_gradients": True, "overlap": "all", "dispatch": "once"}}


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
    margin
        The share of a GPU's memory that stays free.
    offload
        Whether activations may leave to the host.
    stack
        What trains. `torch` is torchtitan or NeMo AutoModel by a schedule's rows, without offload and recomputation by
        the schedule; `megatron` has 1F1B and interleaved 1F1B, and its own offload.
    """

    WHAT = "question"

    model: Transformer
    gpu: Gpu
    gpus: Annotated[int, Field(strict=True, ge=1, le=2**16)]
    batch: Annotated[int, Field(strict=True, ge=1, le=2**24)]
    run: Run
    margin: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.05
    offload: bool = True
    stack: Stack = "optpipe"

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.run.mtp and (self.stack == "torch" or (self.stack == "megatron" and self.model.parts)):
            of = "for a hybrid " * (self.stack == "megatron")
            raise ValueError(
                f"mtp = {self.run.mtp}: expected 0 {of}with stack {self.stack}, for which no such settings are written"
            )
        hides = self.stack == "megatron" and self.run.overlap == "experts"
        if hides and (self.run.mtp > 1 or self.model.parts or self.run.precision == "fp32"):
            raise ValueError(
                "overlap = experts: expected all, as Megatron's combined 1F1B has no hybrids, 32 bits, or more than "
                "one multi-token prediction module"
            )
        if self.run.moe_expert_capacity_factor and self.stack == "torch":
            raise ValueError(
                "moe_expert_capacity_factor: expected none with stack torch, whose experts take all tokens"
            )
        deepep = self.stack == "megatron" and self.run.dispatch == "once" and self.gpu.gpus_per_node <= settings.NODE
        if self.run.moe_pad_expert_input_to_capacity and deepep:
            raise ValueError(
                "moe_pad_expert_input_to_capacity = true: expected dispatch alltoall, as DeepEP never pads"
            )
        return self

    def candidate(self, estimated: Estimate, busy_ms: float | None = None) -> Candidate:
        """One way to train the model with the stack; with `busy_ms` it stands for all whose devices compute at least
        so long for a micro-batch."""
        runs = STACKS[self.stack]
        runs = (
            runs if self.offload else replace(runs, kinds=runs.kinds - {Kind.O, Kind.D, Kind.R}, offloads_modules=False)
        )
        return Candidate(estimated, runs, estimated.run.microbatches * (busy_ms or 0.0))

    @property
    def usable(self) -> Gpu:
        """The GPU with the memory that may be used."""
        return self.gpu.model_copy(update={"memory_bytes": round((1 - self.margin) * self.gpu.memory_bytes)})

    def run_of(self, microbatches: int, size: int, recompute: Recompute) -> Run:
        """The run of a replica with so many micro-batches. torch without compilers has no fused kernel for a gate."""
        chosen = {"microbatches": microbatches, "microbatch_size": size, "recompute": recompute}
        in_torch = {"keep_received": True, "fused": False} if self.stack == "torch" else {}
        return self.run.model_copy(update=chosen | in_torch)

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
    """Return each division with every micro-batch size and recomputation, stages of as many layers, one a device; the
    lowest bound first, which holds for all its `branches`, too.

    Raises
    ------
    InputError
        If no division suits the number of GPUs, the model and the batch.
    """
    every = [question.candidate(each, mean(each.busy_ms) * (1 - each.most_hidden)) for each in _estimates(question)]
    if every:
        return sorted(every, key=lambda candidate: (candidate.bound_ms, candidate.estimate.parallelism.stages))
    model, gpus = question.model, question.gpus
    any_batch = question.model_copy(update={"batch": gpus})  # every dp divides it
    replicas = sorted({division.dp for division in _divisions(any_batch)})
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


def branches(question: Question, candidate: Candidate) -> Iterator[Candidate]:
    """Yield what differs from one of `candidates` in the chunks of a device and the layers of stages only; each
    partition of the layers once."""
    estimated = candidate.estimate
    own, run = estimated.parallelism, estimated.run
    balanced: dict[int, tuple[tuple[int, ...], int]] = {}
    for chunks, shape in _shapes(question, own.pp):
        even = own.model_copy(update={"chunks": chunks, "shape": shape})
        if chunks > 1:
            yield question.candidate(estimated.divided(even, run))
        if chunks not in balanced:  # so that the longest stage is as short as possible
            cuts = list(even_cuts(estimated.layers, [ROOMY] * even.stages))
            cuts[0] -= 1  # the embedding, and at the end the head, are no layers
            cuts[-1] -= 1
            with_modules = even.stages - 1 - (cuts[-1] == 0 and even.stages > 1)
            cuts[with_modules] -= run.mtp > 0
            balanced[chunks] = tuple(cuts), with_modules
        layers, mtp_stage = balanced[chunks]
        if balanced[chunks] != (even_layers(question.model.layers, even.stages, run.mtp), even.stages - 1):
            changed = {"layers": layers, "mtp_stage": mtp_stage if run.mtp else None}
            yield question.candidate(estimated.divided(even.model_copy(update=changed), run))


def shifted(question: Question, candidate: Candidate) -> Iterator[Candidate]:
    """Yield what differs from a candidate in one layer that another stage has; a stage may be left without any. First
    the busiest device has a layer less, the least busy one more."""
    estimated = candidate.estimate
    own, run, busy = estimated.parallelism, estimated.run, estimated.busy_ms
    counts = own.layers or even_layers(question.model.layers, own.stages, run.mtp)
    for a, b in sorted(permutations(range(own.stages), 2), key=lambda ab: busy[ab[1] % own.pp] - busy[ab[0] % own.pp]):
        layers = tuple(count - (s == a) + (s == b) for s, count in enumerate(counts))
        if layers[a] >= 0:
            with suppress(InputError):  # a stage behind the prediction modules has a layer
                yield question.candidate(estimated.divided(own.model_copy(update={"layers": layers}), run))


def _estimates(question: Question) -> Iterator[Estimate]:
    """Yield every division with every micro-batch size and recomputation."""
    pieces: dict[tuple[Any, ...], Estimate] = {}
    for division in _divisions(question):
        pp, dp, cp, zero = division.pp, division.dp, division.cp, division.zero
        replica_batch = question.batch // dp
        least = pp if question.stack == "torch" else 1  # AutoModel refuses fewer micro-batches than ranks
        sizes = (
            size
            for size in tuning.MICROBATCH_SIZES
            if replica_batch % size == 0 and least <= replica_batch // size <= MAX_MICROBATCHES
            if gcd(size, cp) == 1  # else replicas of smaller micro-batches are better
        )
        for size in sizes:
            for recompute in _recomputations(question):
                run = question.run_of(replica_batch // size, size, recompute)
                costs = (
                    division.tp,
                    division.ep,
                    division.etp,
                    cp,
                    (dp, zero) if zero > 1 else None,
                    size,
                    recompute,
                    pp == question.gpus,
                )
                if costs not in pieces:
                    pieces[costs] = estimate(question.model, division, question.usable, run)
                yield pieces[costs].divided(division, run)


def _divisions(question: Question) -> Iterator[Parallelism]:
    """Yield the divisions with one stage a device.

    Tensor parallelism stays within a node. Context parallelism gives each GPU two parts of a sequence, one from each
    end, so that causal attention takes all the same time; only flash attention can be divided so. The other stacks
    want parts of one length, with tensor parallelism, too.
    """
    model, gpu = question.model, question.gpu
    sequence = question.run.sequence or model.sequence or 1
    can_divide = question.run.attention == "flash" and sequence % 2 == 0 and model.state_space is None
    halves = sequence // 2 if can_divide else 1
    for tp in (tp for tp in _divisors(gcd(question.gpus, model.heads)) if gpu.gpus_per_node % tp == 0):
        if model.state_space and not model.state_space.is_divided_by(tp):
            continue
        for cp in _divisors(gcd(question.gpus // tp, halves)):
            if question.stack != "optpipe" and sequence % (tp * (2 * cp if cp > 1 else 1)):
                continue
            for pp in _divisors(question.gpus // tp // cp):
                dp = question.gpus // tp // cp // pp
                if pp > 1 and question.limit:
                    continue
                if pp <= model.layers and question.batch % dp == 0 and max(pp, dp) <= tuning.MOST_DEGREE:
                    for ep, etp in _expert_divisions(question, tp, dp * cp):
                        for zero in zeros(question, pp, dp * cp):
                            yield Parallelism(tp=tp, pp=pp, dp=dp, ep=ep, etp=etp, cp=cp, zero=zero)


def _expert_divisions(question: Question, tp: int, replicas: int) -> Iterator[tuple[int, int | None]]:
    """Yield ep and etp. torchtitan and AutoModel divide no expert that is not on all GPUs of a stage."""
    experts = question.model.experts
    for ep in _divisors(gcd(tp * replicas, experts)) if experts else (1,):
        if replicas % ep == 0 and (question.stack != "torch" or ep == 1):
            yield ep, None
        if (tp > 1 and ep > 1) or (question.stack == "torch" and ep > 1):
            yield ep, 1


def zeros(question: Question, pp: int, replicas: int) -> tuple[int, ...]:
    """The stages of ZeRO that the stack has: our runtime 2; the others without a pipeline FSDP, which is 3."""
    if replicas == 1:
        return (0,)
    return {"optpipe": (1, 2)}.get(question.stack, (1, 3) if pp == 1 else (1,))


def _shapes(question: Question, pp: int) -> Iterator[tuple[int, Shape]]:
    """Yield chunks and shapes that the stack places: of the numbers of chunks whose longest stages have as many layers
    the smallest, as the pipeline fills no faster with others."""
    layers, runs = question.model.layers, STACKS[question.stack]
    yield 1, "looped"
    most = (layers + 2) // pp  # embedding and head may be alone
    for chunks in range(2, 1 + min(most, tuning.LOOPED_CHUNKS)) if pp > 1 else ():
        if -(-layers // (pp * chunks)) < -(-layers // (pp * (chunks - 1))):
            for shape in SHAPES[: 2 if chunks <= tuning.CHUNKS else 1]:
                if runs.places(chunks, shape):
                    yield chunks, shape


def _recomputations(question: Question) -> tuple[Recompute, ...]:
    """Flash attention has no scores that `selective` could leave out; `cheap` only our runtime may do."""
    left_out = {"selective"} if question.run.attention == "flash" or question.stack == "torch" else set()
    left_out |= {"cheap"} if question.stack != "optpipe" else set()
    return tuple(level for level in LEVELS if level not in left_out)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
