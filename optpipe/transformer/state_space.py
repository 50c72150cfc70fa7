"""What a mixer with a state that passes from token to token computes, saves and holds on one GPU, with its norm.

Letters as in `optpipe.transformer.work`.
"""

from __future__ import annotations

from optpipe.transformer.records import StateSpace
from optpipe.transformer.work import FP32, NORM, RESIDUAL, SCAN_SLOWER, Matmul, Piece, Saved, Share, Work

CHUNK = {"mamba": 128, "delta": 64}  # tokens whose products are computed at once (Megatron-LM, flash-linear-attention)
STATES = 4  # times that the state of each chunk is read or written, in 32 bits: made, passed on, used


def state_space(share: Share) -> Piece:
    """A piece without an MLP: projection, convolution, scan, gated norm, projection.

    The scan within chunks is that of Dao and Gu 2024, section 6, or of Yang et al. 2025, section 3.3. What the
    convolution puts out and the states between chunks are computed again in every backward, as their kernels do.
    """
    mixer, whole = share.shape.state_space, share.message_bytes
    assert mixer is not None
    heads = mixer.heads / share.parallelism.tp
    inner = heads * mixer.head_size
    shared = max(1.0, mixer.groups / share.parallelism.tp) * mixer.state  # of what writes, and of what reads
    mixed = inner + 2 * shared  # channels of the convolution
    steps = heads if mixer.kind == "mamba" else 2 * heads
    projected = mixed + inner + steps
    states = FP32 * share.tokens * inner * mixer.state / CHUNK[mixer.kind]
    return Piece(
        kind="dense",
        weights=share.shape.hidden * (projected + inner) + mixed * mixer.kernel + _vectors(mixer, heads, inner, mixed),
        saved=(
            Saved("norm input", whole, None),
            share.operand("projection's input", whole, "cheap"),
            Saved("projected", share.tensor_bytes(projected)),
            Saved("scan's output", share.tensor_bytes(inner)),
            share.operand("gated norm's output", share.tensor_bytes(inner), "cheap"),
            *share.residual_mask(),
        ),
        gradients=share.tensor_bytes(projected) + whole,
        work=Work(
            matmuls=(
                Matmul(share.tokens, projected, share.shape.hidden),
                Matmul(share.tokens, share.shape.hidden, inner),
            ),
            scans=share.tokens * _operations(mixer, heads, shared),
            traffic=(NORM + RESIDUAL) * whole
            + SCAN_SLOWER * (share.tensor_bytes(3 * mixed + 4 * inner) + STATES * states),
            again=NORM * whole + share.tensor_bytes(3 * inner),
            passes=6,
            sent=share.reduced,
        ),
    )


def _vectors(mixer: StateSpace, heads: float, inner: float, mixed: float) -> float:
    """Of Mamba-2 three numbers a head, a norm and the convolution's bias; of the delta rule two, and a head's norm."""
    return 3 * heads + inner + mixed if mixer.kind == "mamba" else 2 * heads + mixer.head_size


def _operations(mixer: StateSpace, heads: float, shared: float) -> float:
    """Of a token: with the tokens of its chunk before it, half of them on average, and with the state.

    The delta rule also multiplies keys by keys, and two products by the inverse of what comes of it.
    """
    chunk, size, state = CHUNK[mixer.kind], mixer.head_size, mixer.state
    if mixer.kind == "mamba":
        return chunk * shared + heads * (chunk * size + 4 * state * size)
    return heads * (chunk * (3 * state + 2 * size) + 6 * state * size)
