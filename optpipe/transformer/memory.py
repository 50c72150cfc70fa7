"""What each GPU of a device holds: model state, workspace and reserve, and what is left for activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from optpipe.transformer.gpu import Gpu
from optpipe.transformer.share import Share
from optpipe.transformer.work import Piece

MESSAGES = 4  # two on the way in, two on the way out
# Measured peaks of whole GPUs over computed ones, what is reserved aside: BPipe's 37 GiB over 38.8, pith-train's 58
# over 51.4 (docs/costs.md#checks). Fragments of the allocator and buffers of communication are most of the difference.
MEASURED_PEAKS = (0.95, 1.13)


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


def device_memory(share: Share, gpu: Gpu, pieces: Sequence[Piece]) -> DeviceMemory:
    """What a GPU holds of the device that has these pieces."""
    run = share.run
    sizes = ((run.value_bytes, 3), (run.gradient_bytes, 2), (run.state_bytes, 1))
    weights, gradients, optimizer = (ceil(each * kept_weights(share, pieces, zero)) for each, zero in sizes)
    workspace = _workspace(share, pieces)
    left = gpu.memory_bytes - gpu.reserved_bytes - (weights + gradients + optimizer) - workspace
    return DeviceMemory(weights, gradients, optimizer, workspace, gpu.reserved_bytes, left)


def count_weights(share: Share, pieces: Sequence[Piece]) -> tuple[float, float]:
    """How many weights a GPU of the device with these pieces works with: dense ones, and those of experts."""
    dense = sum(piece.weights for piece in pieces)
    if share.shape.tied and {"embedding", "head"} <= {piece.kind for piece in pieces}:
        dense -= share.shape.embedding_matrix / share.parallelism.tp
    return dense, sum(piece.expert_weights for piece in pieces)


def kept_weights(share: Share, pieces: Sequence[Piece], zero: int) -> float:
    """Of how many weights a rank keeps what ZeRO divides from this stage on (Rajbhandari et al. 2020, figure 1)."""
    dense, experts = count_weights(share, pieces)
    parallelism = share.parallelism
    if parallelism.zero < zero:
        return dense + experts
    replicas = parallelism.dp * parallelism.cp
    return dense / replicas + experts / (replicas / parallelism.ep)


def _workspace(share: Share, pieces: Sequence[Piece]) -> int:
    """What lives while an op runs: recomputed tensors and gradients of a piece, messages, whole weights."""
    run, zero = share.run, share.parallelism.zero
    inside = max(
        piece.activation_bytes("none") - piece.activation_bytes(run.recompute) + piece.gradients for piece in pieces
    )
    messages = MESSAGES * share.message_bytes if share.parallelism.pp > 1 else 0.0
    # With ZeRO 3 the weights of a layer and the next, with ZeRO 2 a layer's gradients before they are reduced.
    gathered = 2 * run.value_bytes * (zero >= 3) + run.gradient_bytes * (zero >= 2)
    return ceil(inside + messages + gathered * max(piece.weights + piece.expert_weights for piece in pieces))
