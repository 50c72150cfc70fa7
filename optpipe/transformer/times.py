"""How long a piece takes on a GPU: operations and bytes over the speeds that are reached."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any

from optpipe.errors import InputError
from optpipe.model.records import StageCosts
from optpipe.transformer.pieces import LEVELS, Piece
from optpipe.transformer.records import Gpu, Parallelism, Run

# The scores' backward over their forward: four matmuls for two; flash attention computes the scores once more, five for
# two (Dao 2023, FlashAttention-2, section 3.1).
SCORES_BACKWARD = {"flash": 2.5, "unfused": 2.0}
MS = 1000


@dataclass(frozen=True)
class Clock:
    """Times of pieces on one GPU of a stage, in ms."""

    gpu: Gpu
    parallelism: Parallelism
    run: Run

    def costs(self, piece: Piece) -> StageCosts:
        """The piece as a layer of a problem.

        With ZeRO 2 every W reduces its gradients, with ZeRO 3 every F and B gather its weights, too (Rajbhandari et al.
        2020, section 7.2). Nothing of that is hidden.
        """
        run, zero = self.run, self.parallelism.zero
        gather = self._over_replicas(run.value_bytes, piece.weights, piece.expert_weights) if zero >= 3 else 0.0
        reduce = self._over_replicas(run.gradient_bytes, piece.weights, piece.expert_weights) if zero >= 2 else 0.0
        forward = self.forward_ms(piece) + gather
        held = ceil(piece.activation_bytes(run.recompute))
        fields: dict[str, Any] = {}
        if piece.is_layer and run.recompute != "full":
            fields = {"recompute_ms": forward, "checkpoint_bytes": ceil(piece.activation_bytes("full"))}
        return StageCosts(
            forward_ms=forward,
            backward_input_ms=self.backward_input_ms(piece) + gather,
            backward_weight_ms=self.backward_weight_ms(piece) + reduce,
            activation_bytes=held,
            saved_for_weight_bytes=ceil(piece.saved_for_weight_bytes),
            offload_ms=held / self.host_speed * MS,
            reload_ms=held / self.host_speed * MS,
            offload_bytes=held,
            **fields,
        )

    def forward_ms(self, piece: Piece) -> float:
        work = piece.work
        return self._matmul(work.matmul) + self._scores(work.scores) + self._memory(work.traffic) + self._sent(piece)

    def backward_input_ms(self, piece: Piece) -> float:
        """A matmul's input gradient is one matmul of the same size; what reads x and writes y, now also reads dy."""
        work = piece.work
        scores = SCORES_BACKWARD[self.run.attention] * self._scores(work.scores)
        again = self._sent(piece) + self._over(work.over_context, self.parallelism.tp * self.parallelism.cp)
        return self._matmul(work.matmul) + scores + 2 * self._memory(work.traffic) + again + self._recomputed(piece)

    def backward_weight_ms(self, piece: Piece) -> float:
        """A matmul's weight gradient is one matmul of the same size, or longer if memory is too slow for its sums.

        The matmul adds to the gradients of earlier micro-batches while it runs.
        """
        sums = 2 * self.run.gradient_bytes * (piece.weights + piece.expert_weights)
        return max(self._matmul(piece.work.matmul), self._memory(sums))

    def message_ms(self, nbytes: float) -> float:
        """Time of a message between stages; they are on other nodes unless one node has all GPUs."""
        return self._over(nbytes, self.parallelism.gpus) if self.parallelism.pp > 1 else 0.0

    def reduction_ms(self, weights: float, expert_weights: float) -> float:
        """Time in which data-parallel ranks sum so many weights' gradients and share the new weights, in an iteration.

        A reduce-scatter and an all-gather: of gradients and weights with ZeRO 1, twice of gradients without it. ZeRO 2
        reduces in every W instead, and ZeRO 3 gathers when weights are used.
        """
        gradients, values = self.run.gradient_bytes, self.run.value_bytes
        each = (2 * gradients, gradients + values, values, 0)[self.parallelism.zero]
        return self._over_replicas(each, weights, expert_weights)

    def _over_replicas(self, each: int, weights: float, expert_weights: float) -> float:
        """Time of a reduce-scatter or an all-gather of so many bytes a weight over data-parallel ranks.

        On a ring each of n ranks sends (n - 1)/n of all bytes (Patarasuk and Yuan 2009).
        """
        parallelism = self.parallelism
        ranks = parallelism.dp * parallelism.cp
        shares = ((weights, ranks), (expert_weights, ranks // parallelism.ep))
        return self._over(sum(each * (n - 1) / n * size for size, n in shares), parallelism.tp * ranks)

    @cached_property
    def host_speed(self) -> float:
        """Bytes per second from or to the host, in one direction.

        GPUs that share a link and run the same stage transfer at the same time. Otherwise neighbours in the pipeline
        share it, and the problem names it.
        """
        sharing = 1 if self.links_shared else self.gpu.gpus_per_host_link
        return self.gpu.host_bytes_per_s * self.gpu.host_fraction / sharing

    @property
    def links_shared(self) -> bool:
        """Whether neighbours in the pipeline share host links."""
        return self.gpu.gpus_per_host_link > 1 and self.parallelism.gpus == self.parallelism.pp

    def _recomputed(self, piece: Piece) -> float:
        """What the backward computes again."""
        if not piece.is_layer:
            return 0.0
        level = LEVELS.index(self.run.recompute)
        if self.run.recompute == "full":
            return self.forward_ms(piece)
        scores = self._scores(piece.work.scores) if level >= 1 and self.run.attention == "unfused" else 0.0
        return scores + (self._memory(piece.work.again) if level >= LEVELS.index("cheap") else 0.0)

    def peak(self, precision: str) -> float:
        """The GPU's peak at this precision. Raises InputError if it has none."""
        for name, flops in self.gpu.flops.items():
            if name == precision:
                return flops
        raise InputError(f"precision = {precision}: {self.gpu.name or 'the GPU'} has {', '.join(self.gpu.flops)}")

    def _matmul(self, operations: float) -> float:
        return operations / (self.peak(self.run.precision) * self.gpu.matmul_fraction) * MS

    def _scores(self, operations: float) -> float:
        precision = "bf16" if self.run.precision == "fp8" else self.run.precision
        return operations / (self.peak(precision) * self.gpu.attention_fraction) * MS

    def _memory(self, nbytes: float) -> float:
        return nbytes / (self.gpu.memory_bytes_per_s * self.gpu.memory_fraction) * MS

    def _sent(self, piece: Piece) -> float:
        """What F waits for, from the other GPUs of its stage."""
        work, parallelism = piece.work, self.parallelism
        return (
            self._over(work.over_tensor, parallelism.tp)
            + self._over(work.over_context, parallelism.tp * parallelism.cp)
            + self._over(work.over_experts, parallelism.tp * parallelism.ep)
        )

    def _over(self, nbytes: float, gpus: int) -> float:
        """Time of so many bytes among so many neighbouring GPUs."""
        near = gpus <= self.gpu.gpus_per_node
        speed = self.gpu.link_bytes_per_s if near else self.gpu.network_bytes_per_s
        return nbytes / (speed * self.gpu.link_fraction) * MS
