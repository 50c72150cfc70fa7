"""How long a piece takes on a GPU: its kernels, the host that launches them, and what is sent over links of a node, the
network and the link to the host.

A matmul takes its operations over the speed that matmuls of its depth reach, or its bytes over that of memory,
whichever is longer. Kernels run while the host launches further ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any, NamedTuple

from optpipe.errors import InputError
from optpipe.model.records import EXCHANGE, StageCosts
from optpipe.transformer.gpu import Gpu
from optpipe.transformer.records import Parallelism, Precision, Recompute, Run
from optpipe.transformer.work import LEVELS, OPERAND_BYTES, SCAN_SLOWER, Collective, Matmul, Piece, Work

MS, US = 1000, 1e-3  # ms of a second and of a microsecond
# The scores' backward over their forward: four matmuls for two; flash attention computes the scores once more, five for
# two (Dao 2023, FlashAttention-2, section 3.1).
SCORES_BACKWARD = {"flash": 2.5, "unfused": 2.0}
TRAFFIC_BACKWARD = 2  # F reads x and writes y, B reads x and dy and writes dx, and norms read both once more
UNALIGNED = 1.5  # times as long: heads of 50257 words in vTrain's rows; Netflix (2026) has 3 in all of such a head
ROUNDED_TWICE = 2  # along rows for one matmul, along columns for the other one of the two that a tensor is in
HIDDEN = (
    0.5  # of collectives that a stack sends beside matmuls, of 0, 0.5 and 1 - 1/tp the best for measured iterations
)
# Kernels are shorter or longer than it takes to launch them, so a piece takes longer than either sum, and less than
# both: the norm of both with this exponent. 2 to 6 predict measured iterations about equally well.
HOST_AND_GPU = 3


class Times(NamedTuple):
    """Where the time of an op goes, in ms; `host` is by how much launching kernels makes it longer."""

    matmuls: float = 0.0
    attention: float = 0.0
    passes: float = 0.0
    host: float = 0.0
    messages: float = 0.0
    recomputing: float = 0.0

    @property
    def ms(self) -> float:
        return sum(self)


def total(times: Iterable[Times]) -> Times:
    """Where the time of several ops goes."""
    return Times(*map(sum, zip(*times, strict=True)))


def trained_weights(piece: Piece) -> tuple[float, float]:
    """How many weights of a piece are trained: dense ones, and those of experts."""
    return (piece.weights, piece.expert_weights) if piece.trained is None else (piece.trained, 0.0)


@dataclass(frozen=True)
class Links:
    """The links of one GPU, and which GPUs are at their other ends. Sizes in bytes."""

    gpu: Gpu
    parallelism: Parallelism

    def message_ms(self, nbytes: float) -> float:
        """Time of an activation between stages; they are on other nodes unless one node has all GPUs.

        What all GPUs of a tensor-parallel group have is sent in parts, one by each, and gathered (Narayanan et al.
        2021, section 4.1).
        """
        t = self.parallelism.tp // self.parallelism.along_sequence
        return self.transfer_ms(nbytes / t) + self.ring_ms((t - 1) / t * nbytes, t, 1, t - 1)

    def transfer_ms(self, nbytes: float) -> float:
        """Time of so many bytes from a GPU of one stage to one of the next."""
        p = self.parallelism
        return self.ring_ms(nbytes, 2, p.gpus / 2, 1) if p.pp > 1 else 0.0

    def collectives_ms(self, collectives: Iterable[Collective], over: str | None = None) -> float:
        """Time of collectives within a stage; of those over one dimension if that is named."""
        p = self.parallelism
        groups = {"tensor": (p.tp, 1), "context": (p.cp, p.tp), "experts": (p.ep, p.expert_tp)}
        return sum(
            self.exchange_ms(each, *groups[each.over])
            if each.over == "experts"
            else self.ring_ms(each.bytes, *groups[each.over], each.steps)
            for each in collectives
            if over in (None, each.over)
        )

    def replicas_ms(self, weight_bytes: int, weights: float, expert_weights: float) -> float:
        """Time of a reduce-scatter or an all-gather of so many bytes a weight over data-parallel ranks.

        On a ring each of n ranks sends (n - 1)/n of all bytes, in n - 1 steps (Patarasuk and Yuan 2009).
        """
        p = self.parallelism
        ranks = p.dp * p.cp
        return sum(
            self.ring_ms(weight_bytes * (n - 1) / n * count, n, p.tp * ranks // n, n - 1)
            for count, n in ((weights, ranks), (expert_weights, p.expert_replicas))
            if weight_bytes * count
        )

    def ring_ms(self, nbytes: float, ranks: int, stride: float, steps: int) -> float:
        """Time of a collective in which each of some ranks sends so many bytes in so many steps, on a ring.

        The ranks are every `stride`-th GPU. A ring leaves a node by one network card, or by all cards if it has all
        GPUs of the node, but no faster than it passes from GPU to GPU within.
        """
        gpu = self.gpu
        link, network = gpu.link_bytes_per_s * gpu.link_fraction, gpu.network_bytes_per_s * gpu.network_fraction
        if ranks * stride <= gpu.gpus_per_node:
            speed = link
        else:
            speed = max(network, min(link, gpu.gpus_per_node * network)) if stride == 1 else network
        return nbytes / speed * MS + steps * gpu.link_us * US if ranks > 1 else 0.0

    def exchange_ms(self, sent: Collective, ranks: int, stride: int) -> float:
        """Time of an all-to-all in which each of some ranks sends the same to each other rank.

        What goes to other nodes leaves by the rank's own network card, while the rest takes links. With `routing` links
        also spread what came for several GPUs of the node.
        """
        gpu = self.gpu
        near = min(ranks, max(1, gpu.gpus_per_node // stride))
        away = sent.bytes * (ranks - near) / (ranks - 1)
        inside = sent.bytes - away
        if routing := sent.routing:
            single = sent.bytes / (1 - 1 / ranks) / routing.copies
            inside, away = (single * (parts - 1) * routing.reached(parts) for parts in (ranks, ranks / near))
        over_links_s = inside / (gpu.link_bytes_per_s * gpu.link_fraction)
        over_network_s = away / (gpu.network_bytes_per_s * gpu.network_fraction)
        return max(over_links_s, over_network_s) * MS + sent.steps * gpu.link_us * US

    @cached_property
    def host_speed(self) -> float:
        """Bytes per second from or to the host, in one direction.

        GPUs that share a link and run the same stage transfer at the same time. Otherwise neighbours in the pipeline
        share it, and the problem names it.
        """
        sharing = 1 if self.neighbours_share_host_links else self.gpu.gpus_per_host_link
        return self.gpu.host_bytes_per_s * self.gpu.host_fraction / sharing

    @property
    def devices_per_node(self) -> int:
        """How many devices of the pipeline are in a node, in Megatron-LM's order of ranks; 1 where one fills a node, or
        does not divide it."""
        alone, in_node = self.parallelism.gpus // self.parallelism.pp, self.gpu.gpus_per_node
        return in_node // alone if in_node % alone == 0 else 1

    @property
    def neighbours_share_host_links(self) -> bool:
        """Whether neighbours in the pipeline share host links."""
        return self.gpu.gpus_per_host_link > 1 and self.parallelism.gpus == self.parallelism.pp


@dataclass(frozen=True)
class Clock:
    """Times of pieces on one GPU of a stage."""

    gpu: Gpu
    parallelism: Parallelism
    run: Run

    @cached_property
    def links(self) -> Links:
        return Links(self.gpu, self.parallelism)

    def costs(self, piece: Piece) -> StageCosts:
        """The piece as a layer of a problem.

        With ZeRO 2 every W reduces its gradients, with ZeRO 3 every F and B gather its weights, too (Rajbhandari et al.
        2020, section 7.2). Nothing of that is hidden.
        """
        run = self.run
        forward_ms = self.forward(piece).ms
        held = ceil(piece.activation_bytes(run.recompute))
        fields: dict[str, Any] = {}
        if piece.is_layer and run.recompute != "full":
            if run.levels:
                fields = {"levels": list(self._levels(piece))}
            else:
                fields = {"recompute_ms": forward_ms, "checkpoint_bytes": ceil(piece.activation_bytes("full"))}
        backward_ms = self.backward_input(piece).ms
        if run.overlap == "experts" and run.recompute != "full":  # which Megatron refuses together
            sent_ms = self.links.collectives_ms(piece.work.sent, "experts")
            fields |= {
                name: sent_ms / (ms or 1.0) for name, ms in zip(EXCHANGE, (forward_ms, backward_ms), strict=True)
            }
        return StageCosts(
            forward_ms=forward_ms,
            backward_input_ms=backward_ms,
            backward_weight_ms=self.backward_weight(piece).ms,
            activation_bytes=held,
            saved_for_weight_bytes=ceil(piece.saved_for_weight_bytes),
            offload_ms=held / self.links.host_speed * MS,
            reload_ms=held / self.links.host_speed * MS,
            offload_bytes=held,
            **fields,
        )

    def _levels(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """Yields the levels beyond what every backward computes again anyway, without those that keep no less."""
        before, done_ms = ceil(piece.activation_bytes(self.run.recompute)), self._again_ms(piece, self.run.recompute)
        for name in LEVELS[LEVELS.index(self.run.recompute) + 1 :]:
            kept = ceil(piece.activation_bytes(name))
            if kept < before:
                moved_ms = kept / self.links.host_speed * MS
                again_ms = self.forward(piece).ms if name == "full" else self._again_ms(piece, name) - done_ms
                yield {
                    "name": name,
                    "recompute_ms": again_ms,
                    "checkpoint_bytes": kept,
                    "offload_ms": moved_ms,
                    "reload_ms": moved_ms,
                    "offload_bytes": kept,
                }
                before = kept

    def forward(self, piece: Piece, gathers: bool = True) -> Times:
        """With `gathers` ZeRO 3 gathers the weights."""
        work = piece.work
        flash = self._flash(work)
        launched = self._launches(work.matmuls) + len(work.products) + work.passes + len(work.sent) + bool(flash)
        attention = self._products_ms(work.products) + flash + self.flash_ms(SCAN_SLOWER * work.scans)
        matmuls = self._matmuls_ms(work.matmuls)
        rounded = self._rounded_ms(work, lambda each: each.copies * each.rows * each.depth)
        computed = self._overlapped(matmuls, attention, self.pass_ms(work.traffic) + rounded, launched)
        return computed._replace(
            messages=self._sent_ms(work.sent, self._gathering_ms(piece) if gathers else 0.0, matmuls)
        )

    def backward_input(self, piece: Piece) -> Times:
        """A matmul's input gradient is one matmul of the same operations; keys and values come around again."""
        work = piece.work
        products = [each for one in work.products for each in (one.input_gradient, one.weight_gradient)]
        launched = self._launches(work.matmuls) + len(products) + work.passes + len(work.sent) + bool(self._flash(work))
        matmuls = self._matmuls_ms(each.input_gradient for each in work.matmuls)
        computed = self._overlapped(
            matmuls,
            self._products_ms(products)
            + SCORES_BACKWARD["flash"] * (self._flash(work) + self.flash_ms(SCAN_SLOWER * work.scans)),
            self.pass_ms(TRAFFIC_BACKWARD * work.traffic) + self._rounded_ms(work, lambda each: each.outputs),
            launched,
        )
        return computed._replace(
            messages=self._sent_ms(work.sent, self._gathering_ms(piece), matmuls)
            + self.links.collectives_ms(work.sent, "context"),
            recomputing=self._again_ms(piece, self.run.recompute),
        )

    def backward_weight(self, piece: Piece) -> Times:
        """A matmul's weight gradient is one matmul of the same operations, or longer if memory is too slow.

        The matmul adds to the gradients of earlier micro-batches while it runs.
        """
        trained, experts = trained_weights(piece)
        sums = self.pass_ms(2 * self.run.gradient_bytes * (trained + experts))
        own = [each.weight_gradient for each in piece.work.matmuls if not each.frozen]
        matmuls = self._matmuls_ms(own)
        reduced = self.run.gradient_bytes if self.parallelism.zero >= 2 else 0
        return self._overlapped(matmuls, 0.0, max(0.0, sums - matmuls), self._launches(own))._replace(
            messages=self._sent_ms((), self.links.replicas_ms(reduced, trained, experts), matmuls)
        )

    def all_ops(self, piece: Piece) -> Times:
        """F, B and W together."""
        return total((self.forward(piece), self.backward_input(piece), self.backward_weight(piece)))

    def matmul_ms(self, matmul: Matmul, precision: Precision | None = None, grouped: bool = False) -> float:
        """How long one kernel of matmuls takes: its operations at the speed of its depth, or its bytes.

        What a tile computes grows with the depth, what it takes to begin and to end does not: at `matmul_depth` half of
        the fraction is reached. Grouped matmuls, each of other weights, take both in turn: their tiles are few.
        """
        gpu, precision = self.gpu, precision or self.run.precision
        speed = self.peak(precision) * gpu.fraction(precision) / (UNALIGNED if matmul.unaligned else 1)
        computing = matmul.operations * (1 + gpu.matmul_depth / matmul.depth) / speed * MS
        moving = self.pass_ms(OPERAND_BYTES[precision] * matmul.operands + self.run.value_bytes * matmul.outputs)
        return computing + moving if grouped else max(computing, moving)

    def flash_ms(self, operations: float) -> float:
        """How long flash attention takes."""
        return operations / (self.peak(self._wide) * self.gpu.attention_fraction) * MS

    def pass_ms(self, nbytes: float) -> float:
        """How long it takes to read and write so many bytes."""
        return nbytes / (self.gpu.memory_bytes_per_s * self.gpu.memory_fraction) * MS

    def reduction_ms(self, weights: float, expert_weights: float) -> float:
        """Time in which data-parallel ranks sum so many weights' gradients and share the new weights, in an iteration.

        A reduce-scatter and an all-gather: of gradients and weights with ZeRO 1, twice of gradients without it. ZeRO 2
        reduces in every W instead, and ZeRO 3 gathers when weights are used.
        """
        gradients, values = self.run.gradient_bytes, self.run.value_bytes
        collectives = ((gradients, gradients), (gradients, values), (values,), ())[self.parallelism.zero]
        return sum(self.links.replicas_ms(each, weights, expert_weights) for each in collectives)

    def optimizer_ms(self, weights: float) -> float:
        """Time of an optimizer's step for so many weights of this GPU.

        Gradients are read for their norm and by the update, and zeroed; the state is read and written, new weights are
        written. A norm that is small enough clips nothing.
        """
        run = self.run
        return self.pass_ms((3 * run.gradient_bytes + 2 * run.state_bytes + run.value_bytes) * weights)

    def peak(self, precision: Precision) -> float:
        """The GPU's peak at this precision. Raises InputError if it has none."""
        if precision not in self.gpu.flops:
            raise InputError(f"precision = {precision}: {self.gpu.name or 'the GPU'} has {', '.join(self.gpu.flops)}")
        return self.gpu.flops[precision]

    @property
    def _wide(self) -> Precision:
        """The precision of attention and the head, which have 16 bits where layers' matmuls have fewer."""
        return "fp32" if self.run.precision == "fp32" else "bf16"

    def _products_ms(self, products: Iterable[Matmul]) -> float:
        """How long the matmuls of unfused attention take."""
        return sum(self.matmul_ms(each, self._wide) for each in products)

    def _matmuls_ms(self, matmuls: Iterable[Matmul]) -> float:
        by_kernel = not self.run.fused_experts
        return sum(
            self.matmul_ms(each, self._wide if each.wide else None, grouped=by_kernel and each.copies > 1)
            for each in matmuls
        )

    def _launches(self, matmuls: Iterable[Matmul]) -> float:
        """How many kernels of matmuls with weights the host launches: of experts one each, unless they are fused."""
        return sum(1 if self.run.fused_experts else each.copies for each in matmuls)

    def _rounded_ms(self, work: Work, count: Callable[[Matmul], float]) -> float:
        """How long it takes to read such numbers of matmuls' inputs and to write them with fewer bits.

        One of an expert's two matmuls gets from the other what its kernel has rounded, where experts are fused.
        """
        narrow, half = OPERAND_BYTES[self.run.precision], 0.5 if self.run.fused_experts else 1.0
        if narrow >= self.run.value_bytes:
            return 0.0
        numbers = sum(count(each) * (half if each.copies > 1 else 1.0) for each in work.matmuls if not each.wide)
        return self.pass_ms((self.run.value_bytes + ROUNDED_TWICE * narrow) * numbers)

    def _sent_ms(self, sent: tuple[Collective, ...], replicas_ms: float, matmuls_ms: float) -> float:
        """The collectives of an op within its stage and over replicas, without what its matmuls hide of them."""
        overlap = self.run.overlap
        tensor_ms = self.links.collectives_ms(sent, "tensor") if overlap in ("all", "experts") else 0.0
        hidden = HIDDEN * (tensor_ms + (replicas_ms if overlap != "none" else 0.0))
        return self.links.collectives_ms(sent) + replicas_ms - min(hidden, matmuls_ms)

    def _overlapped(self, matmuls: float, attention: float, passes: float, launched: float) -> Times:
        """The time of kernels while the host launches so many."""
        gpu, host = matmuls + attention + passes, launched * self.gpu.host_us * US
        both = (gpu**HOST_AND_GPU + host**HOST_AND_GPU) ** (1 / HOST_AND_GPU)
        return Times(matmuls, attention, passes, both - gpu)

    def _flash(self, work: Work) -> float:
        return 0.0 if work.products else self.flash_ms(work.scores)

    def _again_ms(self, piece: Piece, recompute: Recompute) -> float:
        """What a backward computes again by this level."""
        if not piece.is_layer:
            return 0.0
        level, work = LEVELS.index(recompute), piece.work
        if recompute == "full":
            return self.forward(piece, gathers=False).ms  # B has gathered the weights
        products = self._products_ms(work.products) if level >= LEVELS.index("selective") else 0.0
        return products + (self.pass_ms(work.again) if level >= LEVELS.index("cheap") else 0.0)

    def _gathering_ms(self, piece: Piece) -> float:
        """With ZeRO 3 the weights are gathered whenever they are used."""
        values = self.run.value_bytes if self.parallelism.zero >= 3 else 0
        return self.links.replicas_ms(values, piece.weights, piece.expert_weights)
