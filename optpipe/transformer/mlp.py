"""What an MLP, or experts in its place, compute, save and hold on one GPU, with the norm before it.

Each function returns a `Piece` without attention. Letters as in `optpipe.transformer.share`.
"""

from __future__ import annotations

from optpipe.transformer.share import FP32, NORM, RESIDUAL, Share
from optpipe.transformer.work import Collective, Matmul, Piece, Saved, Work


def mlp(share: Share) -> Piece:
    """19·b·s·h and its norm's 2·b·s·h, if the width is 4h and there is no gate (Korthikanti et al. 2023)."""
    shape, whole = share.shape, share.message_bytes
    local_width, matrices = shape.ffn / share.parallelism.tp, shape.up_matrices + 1
    middle = share.tensor_bytes(local_width)
    return Piece(
        kind="dense",
        weights=shape.hidden * local_width * matrices + shape.all_vectors.mlp,
        saved=(
            Saved("norm input", whole),
            Saved("MLP input", whole, "cheap", operand=True),
            *_saved_between(share, local_width * share.tokens),
            *share.residual_mask(),
        ),
        gradients=shape.up_matrices * middle + whole,
        work=Work(
            matmuls=_up_and_down(share, local_width),
            traffic=(NORM + RESIDUAL) * whole + matrices * middle,
            again=NORM * whole + matrices * middle,
            passes=3,
            sent=share.reduced,
        ),
    )


def experts(share: Share) -> Piece:
    """Router, experts and the shared expert. Each token is sent to `experts_per_token` experts and back.

    What comes back is weighted by the router and stays saved for the weights' gradients.
    """
    shape, parallelism, whole = share.shape, share.parallelism, share.message_bytes
    hidden, tp, ep, along = shape.hidden, parallelism.tp, parallelism.ep, parallelism.along_sequence
    matrices, value_bytes = shape.up_matrices + 1, share.run.value_bytes
    sent = share.tokens * shape.experts_per_token * share.run.expert_load  # tokens to this GPU's experts
    sent_bytes = value_bytes * sent * hidden
    numbers = shape.expert_ffn * sent / tp + shape.shared_ffn * share.tokens / tp  # behind the up matrices
    middle, local = value_bytes * numbers, shape.experts / ep
    over_experts = Collective("experts", 2 * sent_bytes * (1 - 1 / ep) / tp, 2 * (ep - 1))
    return Piece(
        kind="expert",
        weights=hidden * shape.experts + hidden * shape.shared_ffn * matrices / tp + shape.all_vectors.router,
        expert_weights=local * (hidden * shape.expert_ffn * matrices / tp + shape.all_vectors.expert),
        saved=(
            Saved("norm input", whole),
            Saved("router's input", whole, "cheap", operand=True),
            Saved("router's output", FP32 * share.tokens * shape.experts / along),
            Saved("experts' input", sent_bytes, operand=True),
            *_saved_between(share, numbers),
            Saved("experts' output", share.tensor_bytes(shape.experts_per_token * hidden) / along),
        ),
        gradients=shape.up_matrices * middle + sent_bytes + (whole if shape.shared_ffn else 0.0),
        work=Work(
            matmuls=(
                Matmul(share.tokens / along, shape.experts, hidden),
                Matmul(sent / local, shape.up_matrices * shape.expert_ffn / tp, hidden, local),
                Matmul(sent / local, hidden, shape.expert_ffn / tp, local),
                *(_up_and_down(share, shape.shared_ffn / tp) if shape.shared_ffn else ()),
            ),
            traffic=(NORM + RESIDUAL) * whole + 4 * sent_bytes + matrices * middle,
            again=NORM * whole + matrices * middle,
            passes=5,
            sent=(*share.reduced, *((over_experts,) if ep > 1 else ())),
        ),
    )


def _up_and_down(share: Share, width: float) -> tuple[Matmul, ...]:
    """The matmuls of a dense MLP of this width on the GPU."""
    shape = share.shape
    return (
        Matmul(share.tokens, shape.up_matrices * width, shape.hidden),
        Matmul(share.tokens, shape.hidden, width),
    )


def _saved_between(share: Share, numbers: float) -> list[Saved]:
    """The activation function's inputs, with a gate two, and its output, which the last matrix takes."""
    shape, size = share.shape, share.run.value_bytes * numbers
    return [
        *([Saved("gate", size, "cheap")] if shape.gated and not share.run.fused else []),
        Saved("activation function's input", shape.up_matrices * size),
        Saved("activation function's output", size, "cheap", operand=True),
    ]
