"""`estimate`: from a transformer's shape to a problem, with what each device holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import ceil

from optpipe.errors import InputError
from optpipe.model.placement import Placement, pair_factors, together
from optpipe.model.problem import Problem
from optpipe.model.records import COMPUTE_MS, EXCHANGE, Device, Stage, StageCosts, one_for_all
from optpipe.transformer.gpu import Extent, Gpu
from optpipe.transformer.pieces import all_pieces
from optpipe.transformer.records import Parallelism, Run, Transformer
from optpipe.transformer.times import Clock, Times, total, trained_weights
from optpipe.transformer.work import Piece, Share

MESSAGES = 4  # two on the way in, two on the way out
# Measured peaks of whole GPUs over computed ones, what is reserved aside: BPipe's 37 GiB over 38.8, pith-train's 58
# over 51.4 (docs/costs.md#checks). Fragments of the allocator and buffers of communication are most of the difference.
MEASURED_PEAKS = (0.95, 1.13)
# What torch's allocator reserves beyond what is allocated at its peak, and the standard deviation: of all ranks of
# SimuMax's given rows on B200.
FRAGMENTS, FRAGMENTS_DEVIATION = 0.04, 0.02


@dataclass(frozen=True)
class DeviceMemory:
    """The bytes of one GPU of a device: what is there all the time, and what remains for activations.

    `budget` is negative if the rest does not fit.
    """

    weights: int
    gradients: int
    optimizer: int
    workspace: int
    reserved: int
    budget: int

    @property
    def state(self) -> int:
        """Weights, gradients and optimizer state."""
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class Estimate:
    """What a transformer takes on these GPUs, by formula; `problem` is the problem to schedule."""

    shape: Transformer
    parallelism: Parallelism
    gpu: Gpu
    run: Run

    @cached_property
    def sequence(self) -> int:
        """Tokens of a sequence. Raises InputError if neither the run nor the shape has it."""
        sequence = self.run.sequence or self.shape.sequence
        if sequence is None:
            raise InputError("sequence is missing: the model has none; give its tokens, such as --sequence 4096")
        return sequence

    @cached_property
    def pieces(self) -> list[Piece]:
        """Embedding, layers and head, as one GPU has them. Raises InputError if they cannot be divided so."""
        shape, parallelism = self.shape, self.parallelism
        if shape.heads % parallelism.tp:
            raise InputError(f"tp = {parallelism.tp}: must divide the model's {shape.heads} heads")
        if (mixer := shape.state_space) and not mixer.is_divided_by(parallelism.tp):
            raise InputError(
                f"tp = {parallelism.tp}: must divide the {mixer.heads} heads of the state space, and divide its "
                f"{mixer.groups} groups or be a multiple of them"
            )
        if parallelism.cp > 1 and mixer:
            raise InputError(
                f"cp = {parallelism.cp}: expected 1, as a state that passes from token to token is not divided"
            )
        if self.sequence % parallelism.cp:
            raise InputError(f"cp = {parallelism.cp}: must divide the sequence of {self.sequence} tokens")
        if shape.experts % parallelism.ep or (parallelism.ep > 1 and not shape.experts):
            raise InputError(f"ep = {parallelism.ep}: must divide the model's {shape.experts} experts")
        if parallelism.head_parts > 1 and (shape.tied or self.run.mtp):
            why = "tied to the embedding" if shape.tied else f"there mtp = {self.run.mtp} times more"
            raise InputError(f"head_parts = {parallelism.head_parts}: expected 1, as the head's matrix is {why}")
        if self.run.overlap == "experts" and not shape.experts:
            raise InputError("overlap = experts: expected none, replicas or all, as the model has no experts")
        factor, most = self.run.moe_expert_capacity_factor or 0.0, shape.experts / max(1, shape.experts_per_token)
        if self.run.moe_pad_expert_input_to_capacity and not factor:
            raise InputError("moe_pad_expert_input_to_capacity = true: needs moe_expert_capacity_factor")
        if factor > most:
            why = f"at most {most:g}, which are all tokens" if most else "none, as the model has no experts"
            raise InputError(f"moe_expert_capacity_factor = {factor:g}: expected {why}")
        if self.run.lora and shape.experts:
            raise InputError(f"lora = {self.run.lora}: adapters of models with experts are not modelled; 0 trains all")
        return all_pieces(self._share)

    @cached_property
    def layers(self) -> list[StageCosts]:
        """What each piece costs."""
        costs = {key: self.clock.costs(piece) for key, piece in _by_kind(self.pieces).items()}
        return [costs[id(piece)] for piece in self.pieces]

    @cached_property
    def clock(self) -> Clock:
        return Clock(self.gpu, self.parallelism, self.run)

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """How many pieces each stage has: its layers, and the embedding, the head or the prediction modules."""
        parallelism, layers = self.parallelism, self.shape.layers
        counts = list(parallelism.layers or even_layers(layers, parallelism.stages, self.run.mtp))
        if sum(counts) != layers:
            raise InputError(f"layers add up to {sum(counts)}: the model has {layers}")
        last = parallelism.stages - 1
        predicting = last if parallelism.mtp_stage is None else parallelism.mtp_stage
        if parallelism.mtp_stage is not None and not self.run.mtp:
            raise InputError(f"mtp_stage = {predicting}: expected none, as the run has mtp = 0")
        if self.run.mtp and (predicting > last or any(counts[predicting + 1 :])):
            raise InputError(f"mtp_stage = {predicting}: expected a stage behind which no stage has layers")
        counts[0] += 1
        counts[-1] += parallelism.head_parts
        counts[predicting] += self.run.mtp > 0
        if 0 in counts and parallelism.layers is None:
            raise InputError(
                f"pp · chunks = {len(counts)}: stage {counts.index(0)} has no layer, the model has {layers}"
            )
        if idle := set(self.order) - {device for device, count in zip(self.order, counts, strict=True) if count}:
            raise InputError(f"layers = {parallelism.layers}: device {min(idle)} has none")
        return tuple(counts)

    @cached_property
    def stages(self) -> list[range]:
        """The pieces of each stage."""
        return [range(a, b) for a, b in pairwise((0, *accumulate(self.cuts)))]

    @cached_property
    def order(self) -> list[int]:
        """The device of each stage."""
        placement = Placement(chunks=self.parallelism.chunks, shape=self.parallelism.shape)
        return placement.along(range(self.parallelism.pp))

    @cached_property
    def devices(self) -> list[DeviceMemory]:
        """What each device holds."""
        received = [0] * self.parallelism.pp  # messages of a micro-batch: activations, and gradients
        for before, after in pairwise(self.order):
            if before != after:
                received[before] += 1
                received[after] += 1
        return [device_memory(self._share, self.gpu, *each) for each in zip(self._device_pieces, received, strict=True)]

    @cached_property
    def _piece_numbers(self) -> list[list[int]]:
        """The numbers of the pieces that each device has."""
        held: list[list[int]] = [[] for _ in range(self.parallelism.pp)]
        for device, pieces in zip(self.order, self.stages, strict=True):
            held[device] += pieces
        return held

    @cached_property
    def _device_pieces(self) -> list[list[Piece]]:
        return [[self.pieces[i] for i in held] for held in self._piece_numbers]

    @cached_property
    def problem(self) -> Problem:
        """Raises InputError if a device has no room for activations."""
        for d, memory in enumerate(self.devices):
            if memory.budget <= 0:
                has = self.gpu.memory_bytes / 1e9
                raise InputError(
                    f"device {d} needs {has - memory.budget / 1e9:.1f} GB without any activation, the GPU has "
                    f"{has:.1f}: more pp, tp, dp with zero, or a smaller model would fit"
                )
        stages = tuple(
            Stage(device=device, **together([self.layers[i] for i in pieces]))
            for device, pieces in zip(self.order, self.stages, strict=True)
        )
        named, n = self.clock.links.neighbours_share_host_links, self.gpu.gpus_per_host_link
        near = self.clock.links.devices_per_node if self.run.host_memory_bytes is not None else 1
        return Problem(
            name=f"{self.shape.name or 'model'}-{self.parallelism.pp}x{self.run.microbatches}"[:200],
            microbatches=self.run.microbatches,
            p2p_ms=self.message_ms,
            transfer_mode="full_duplex",
            devices=tuple(
                Device(
                    activation_budget_bytes=memory.budget,
                    host_memory_bytes=self.run.host_memory_bytes,
                    link=f"host {d // n}" if named else None,
                    node=f"node {d // near}" if near > 1 else None,
                )
                for d, memory in enumerate(self.devices)
            ),
            stages=stages,
            layers=tuple(self.layers),
            overlap_factor=pair_factors(stages) if any(stage.forward_exchange for stage in stages) else None,
        )

    @property
    def message_ms(self) -> float:
        """The time of an activation, or of its gradient, from one stage to the next."""
        return self.clock.links.message_ms(self._share.message_bytes)

    @property
    def extent(self) -> Extent:
        """What an iteration has on a GPU."""
        experts = self.shape.experts // self.parallelism.ep
        return Extent(tokens=round(self._share.tokens), experts=experts, recompute=(self.run.recompute,))

    @property
    def not_measured(self) -> list[str]:
        """What no iteration had that the GPU's parameters were learned from, or compared with, if these are known."""
        own = self.extent
        known = self.gpu.measured or own
        more = [f"{level} recomputation" for level in own.recompute if level not in known.recompute]
        for name, what in (("tokens", "tokens of a micro-batch"), ("experts", "experts")):
            here, most = getattr(own, name), getattr(known, name)
            more += [f"{here:,} {what} on a GPU, {most:,} at most"] if here > most else []
        return more

    @property
    def messages_beside_copies(self) -> float:
        """Bytes of messages over those of all copies, one way, on the stage where that is most: with each activation a
        stage sends its output and a gradient."""
        sent = 2 * self._share.message_bytes * self.parallelism.along_sequence / self.parallelism.tp
        held = [sum(one_for_all(self.layers[i].activation_bytes) for i in pieces) for pieces in self.stages]
        return sent / min(held) if self.parallelism.pp > 1 else 0.0

    @property
    def parameters(self) -> int:
        """Parameters of the whole model; matrices that are there twice count once."""
        whole = all_pieces(Share(self.shape, Parallelism(), self.run, self.sequence))
        total = sum(piece.weights + piece.expert_weights for piece in whole)
        return round(total - self.shape.embedding_matrix * (self.shape.tied + (self.run.mtp > 0)))

    @property
    def model_flops(self) -> float:
        """Operations of F, B and W of one micro-batch on all GPUs: 72·b·s·h²(1 + s/6h) a layer of width 4h.

        Narayanan et al. 2021, and Chowdhery et al. 2022, appendix B: all scores count, recomputation does not. Weights
        that are not trained have no W.
        """
        skipped = 2 if self.shape.causal and self.run.attention == "flash" else 1  # scores of later tokens
        # Over all GPUs experts have the mean of tokens, and none is dropped.
        evenly = self.run.model_copy(update={"expert_load": 1.0, "moe_expert_capacity_factor": None})
        works = [piece.work for piece in all_pieces(replace(self._share, run=evenly))]
        forward = sum(each.matmul + skipped * each.scores + each.scans for each in works)
        frozen = sum(matmul.operations for each in works for matmul in each.matmuls if matmul.frozen)
        return (3 * forward - frozen) * self.parallelism.tp * self.parallelism.cp

    @cached_property
    def device_times(self) -> list[Times]:
        """Where the time of one micro-batch goes, on each device."""
        of_piece = {piece: self.clock.all_ops(piece) for piece in set(self.pieces)}
        return [total(of_piece[piece] for piece in pieces) for pieces in self._device_pieces]

    @cached_property
    def busy_ms(self) -> list[float]:
        """How long each device computes for one micro-batch."""
        return [sum(self._layers_ms[i] for i in held) for held in self._piece_numbers]

    @property
    def most_hidden(self) -> float:
        """The largest share of an op that pairs may hide."""
        return max(getattr(layer, share) or 0.0 for layer in self.layers for share in EXCHANGE)

    @cached_property
    def _layers_ms(self) -> list[float]:
        return [sum(one_for_all(getattr(layer, field)) for field in COMPUTE_MS) for layer in self.layers]

    @property
    def torch_factor(self) -> float:
        """For `as_torch_holds`: the most that a piece holds from B until W in PyTorch's pipelining over what F keeps.

        Beside that it has the gradients of the outputs of all matmuls and norms: in 16 bits, with flash attention and a
        width of 4h 22·b·s·h bytes beside 32·b·s·h.
        """
        kept = [(piece, piece.activation_bytes(self.run.recompute)) for piece in set(self.pieces[1:])]
        return max(
            1 + (piece.gradients + (1 + piece.is_layer) * self._share.message_bytes) / activation
            for piece, activation in kept
        )

    @property
    def utilization(self) -> float:
        """The share of the GPUs' peak that is model FLOPs when the slowest device never waits."""
        return self.utilization_in(self.run.microbatches * max(self.busy_ms))

    def utilization_in(self, iteration_ms: float) -> float:
        """The share of the GPUs' peak that is model FLOPs when an iteration takes so long."""
        gpus = self.parallelism.gpus / self.parallelism.dp
        done = self.run.microbatches * self.model_flops
        return done / (iteration_ms / 1000 * gpus * self.clock.peak(self.run.precision))

    @cached_property
    def reduction_ms(self) -> float:
        """The longest time that a device adds its gradients to those of others, once an iteration.

        Data-parallel ranks do, then the first and the last stage where their matrices are tied.
        """
        longest = max(self.clock.reduction_ms(*count_weights(self._share, pieces)) for pieces in self._device_pieces)
        is_copied = (self.shape.tied or self.run.mtp > 0) and self.order[0] != self.order[-1] and not self.run.lora
        tied_bytes = self.run.gradient_bytes * (self.shape.embedding_matrix / self.parallelism.tp)
        return longest + is_copied * self.clock.links.transfer_ms(tied_bytes)

    @cached_property
    def optimizer_ms(self) -> float:
        """The longest time that a device's optimizer takes for its step."""
        return max(self.clock.optimizer_ms(kept_weights(self._share, pieces, zero=1)) for pieces in self._device_pieces)

    @property
    def after_ms(self) -> float:
        """What comes after the schedule in an iteration: the gradients' reduction, and the optimizer's step.

        Where a stack reduces while it computes, a micro-batch's ops hide that.
        """
        hidden = min(self.busy_ms) if self.run.overlap != "none" else 0.0
        return max(0.0, self.reduction_ms - hidden) + self.optimizer_ms

    def divided(self, parallelism: Parallelism, run: Run) -> Estimate:
        """The same pieces on other devices, in other stages, for more or fewer micro-batches, at the same costs.

        So `parallelism` and `run` may differ from this one's only in pp, dp, zero, chunks, shape, layers and the number
        of micro-batches, with ZeRO 2 and 3 not in dp and zero, and no host link may be shared in one and not in the
        other.
        """
        return self._with_pieces(Estimate(self.shape, parallelism, self.gpu, run))

    def on(self, gpu: Gpu) -> Estimate:
        """The same on another GPU."""
        other = Estimate(self.shape, self.parallelism, gpu, self.run)
        vars(other).update(pieces=self.pieces)
        return other

    def with_memory(self, nbytes: int) -> Estimate:
        """The same on GPUs with so much memory."""
        gpu = self.gpu.model_copy(update={"memory_bytes": nbytes})
        return self._with_pieces(Estimate(self.shape, self.parallelism, gpu, self.run))

    def _with_pieces(self, other: Estimate) -> Estimate:
        vars(other).update(pieces=self.pieces, layers=self.layers, _layers_ms=self._layers_ms)
        return other

    @cached_property
    def _share(self) -> Share:
        return Share(self.shape, self.parallelism, self.run, self.sequence)


def estimate(shape: Transformer, parallelism: Parallelism, gpu: Gpu, run: Run) -> Estimate:
    """What a transformer costs, by formula: times in ms and sizes in bytes of one GPU; `.problem` is the problem to
    schedule, with `layers`.

    Parameters
    ----------
    shape
        The transformer, such as `presets.MODELS["llama-2-70b"]` or `huggingface.read(text)`.
    parallelism, gpu, run
        How it is divided, on what, and the training run; `presets.GPUS` has data sheets.

    Raises
    ------
    InputError
        If the parallelism does not divide the model, or nothing says how long sequences are. Reading `.problem` raises
        it if a device has no room for activations.
    """
    estimate = Estimate(shape, parallelism, gpu, run)
    estimate.clock.peak(run.precision)
    _ = estimate.pieces, estimate.cuts
    return estimate


def even_layers(layers: int, stages: int, mtp: int = 0) -> tuple[int, ...]:
    """Layers of each stage; those that are left over go to stages without embedding and head, from the middle on.

    A multi-token prediction module counts in the last stage as two layers, and the head beside it as one.
    """
    last = (max(0, (layers + 2 * mtp + 1) // stages - 2 * mtp - 1),) if mtp and stages > 1 else ()
    rest = stages - len(last)
    base, over = divmod(layers - sum(last), rest)
    inner = sorted(range(rest), key=lambda s: (s in (0, stages - 1), abs(s - (stages - 1) / 2)))
    return (*(base + (s in inner[:over]) for s in range(rest)), *last)


def device_memory(share: Share, gpu: Gpu, pieces: Sequence[Piece], received: int) -> DeviceMemory:
    """What a GPU holds of the device that has these pieces and receives so many messages of each micro-batch."""
    run = share.run
    sizes = ((run.value_bytes, 3), (run.gradient_bytes, 2), (run.state_bytes, 1))
    weights, gradients, optimizer = (ceil(each * kept_weights(share, pieces, zero)) for each, zero in sizes)
    # While an op runs: recomputed tensors and gradients of a piece, messages; with ZeRO 3 the weights of a layer and
    # the next, with ZeRO 2 a layer's gradients before they are reduced.
    kinds = _by_kind(pieces).values()
    in_turn = {"head": 1 + run.mtp, "prediction": max(1, run.mtp)}  # one after the other goes back
    inside = max(
        each.activation_bytes("none")
        - each.activation_bytes(run.recompute)
        + each.gradients / in_turn.get(each.kind, 1)
        for each in kinds
    )
    buffers = max(MESSAGES, run.keep_received * run.microbatches * received)
    messages = buffers * share.message_bytes if share.parallelism.pp > 1 else 0.0
    gathered = 2 * run.value_bytes * (share.parallelism.zero >= 3)
    summed = run.gradient_bytes * (share.parallelism.zero >= 2)
    most = max(gathered * (p.weights + p.expert_weights) + summed * sum(trained_weights(p)) for p in kinds)
    trained = max((trained_weights(p)[0] for p in kinds if p.is_layer), default=0.0)
    workspace = ceil(inside + messages + most + run.fused_gradients * run.value_bytes * trained)
    left = gpu.memory_bytes - gpu.reserved_bytes - (weights + gradients + optimizer) - workspace
    return DeviceMemory(weights, gradients, optimizer, workspace, gpu.reserved_bytes, left)


def _by_kind(pieces: Sequence[Piece]) -> dict[int, Piece]:
    """One of the pieces that are the same object, by its id: comparing all that they have takes longer."""
    return {id(piece): piece for piece in pieces}


def count_weights(share: Share, pieces: Sequence[Piece]) -> tuple[float, float]:
    """How many weights a GPU of the device with these pieces trains: dense ones, and those of experts."""
    dense, experts = map(sum, zip(*map(trained_weights, pieces), strict=True))
    return dense - (0.0 if share.run.lora else _shared_weights(share, pieces)), experts


def _shared_weights(share: Share, pieces: Sequence[Piece]) -> float:
    """How many weights a device has once, though several of its pieces count them."""
    counting = {"embedding", "prediction", *(["head"] if share.shape.tied else [])} & {piece.kind for piece in pieces}
    return max(0, len(counting) - 1) * share.shape.embedding_matrix / share.parallelism.tp


def kept_weights(share: Share, pieces: Sequence[Piece], zero: int) -> float:
    """Of how many weights a rank keeps what ZeRO divides from this stage on (Rajbhandari et al. 2020, figure 1).

    The weights themselves, of stage 3, are there whether they are trained or not.
    """
    dense, experts = count_weights(share, pieces)
    if zero == 3:
        dense = sum(piece.weights for piece in pieces) - _shared_weights(share, pieces)
    parallelism = share.parallelism
    if parallelism.zero < zero:
        return dense + experts
    replicas = parallelism.dp * parallelism.cp
    return dense / replicas + experts / parallelism.expert_replicas
