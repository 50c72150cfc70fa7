"""The pieces of a transformer that are never cut: what each computes, saves and holds, on one GPU.

With 16-bit numbers and an ungated MLP of width 4h a layer saves 34·b·s·h + 5·a·s²·b bytes (Korthikanti et al. 2023, Eq.
1), 20·b·s·h where what is cheap is computed again and scores are never stored (PipeOffload, appendix C). Letters as in
`optpipe.transformer.share`.
"""

from __future__ import annotations

from optpipe.transformer.attention import attention
from optpipe.transformer.mlp import experts, mlp
from optpipe.transformer.share import FP32, Share
from optpipe.transformer.work import Matmul, Piece, Saved, Work

INDEX = 8  # bytes of a token's number
LOSS = 5  # times that F of a cross entropy over divided logits reads or writes them in 32 bits (Megatron-LM's)


def all_pieces(share: Share) -> list[Piece]:
    """Embedding, layers, head."""
    shape = share.shape
    kinds = [(shape.has_experts(i), shape.window_of(i)) for i in range(shape.layers)]
    layers = {kind: _layer(share, *kind) for kind in set(kinds)}
    return [_embedding(share), *(layers[kind] for kind in kinds), _head(share)]


def _embedding(share: Share) -> Piece:
    """The embedding: saves the tokens' numbers and its dropout's mask (Korthikanti et al. 2023, section 4.3)."""
    shape = share.shape
    return Piece(
        kind="embedding",
        weights=shape.embedding_matrix / share.parallelism.tp
        + shape.positions * shape.hidden
        + shape.embedding_projection
        + shape.all_vectors.embedding,
        saved=(
            Saved("tokens", INDEX * share.tokens, None, operand=True),
            Saved("dropout mask", share.mask_bytes, None),
        ),
        gradients=share.message_bytes,
        work=Work(matmuls=_projection(share), traffic=2 * share.message_bytes, passes=2, sent=share.reduced),
    )


def _head(share: Share) -> Piece:
    """Norm, projection and cross entropy, which keeps its logits in 32 bits: 4·s·b·h + 4·s·b·v bytes.

    Korthikanti et al. 2023, section 4.3. Of tied matrices this is the copy on the last stage.
    """
    shape, tp, value_bytes = share.shape, share.parallelism.tp, share.run.value_bytes
    logits = share.tokens * shape.vocabulary / tp
    return Piece(
        kind="head",
        weights=shape.embedding_matrix / tp + shape.embedding_projection + shape.all_vectors.head,
        saved=(
            Saved("norm input", share.message_bytes, None),
            Saved("head input", share.message_bytes, None, operand=True),
            Saved("logits", FP32 * logits, None),
        ),
        gradients=value_bytes * logits,
        work=Work(
            matmuls=(
                Matmul(share.tokens, shape.vocabulary / tp, shape.embedding_width or shape.hidden),
                *_projection(share),
            ),
            traffic=2 * share.message_bytes + (value_bytes + LOSS * FP32) * logits,
            passes=1 + LOSS,
            sent=share.reduced,
        ),
    )


def _layer(share: Share, has_experts: bool, window: int) -> Piece:
    """One transformer layer: attention, to `window` tokens if that is not 0, and an MLP or experts."""
    first, second = attention(share, window), experts(share) if has_experts else mlp(share)
    return Piece(
        kind=second.kind,
        weights=first.weights + second.weights + share.shape.all_vectors.layer,
        expert_weights=second.expert_weights,
        saved=(*first.saved, *second.saved),
        gradients=first.gradients + second.gradients,
        work=first.work + second.work,
    )


def _projection(share: Share) -> tuple[Matmul, ...]:
    """Between an embedding, or a head, of another width and the layers."""
    shape = share.shape
    if not shape.embedding_projection:
        return ()
    return (Matmul(share.tokens, shape.hidden, shape.embedding_width or shape.hidden),)
