"""What attention computes, saves and holds on one GPU, with the norm before it.

Letters as in `optpipe.transformer.work`.
"""

from __future__ import annotations

from optpipe.transformer.work import FP32, MASK, NORM, RESIDUAL, Matmul, Piece, Saved, Share, Work

# Megatron-LM's softmax is one kernel where the heads of a micro-batch on a GPU are a multiple of 4 (fused_softmax.py,
# is_kernel_available). Else there are five: to 32 bits, scale, mask, softmax, back.
FUSED_HEADS, APART = 4, 4


def attention(share: Share, window: int) -> Piece:
    """A piece without an MLP: attention to `window` tokens, to all if that is 0."""
    # A query attends to so many keys on average, those counted that the kernel computes in vain. Flash attention leaves
    # out those of later tokens, and those before the window: of w tokens the first w queries have fewer, w - w²/2s on
    # average. Unfused attention computes all.
    s, flash = share.sequence, share.run.attention == "flash"
    keys = min(window, s) if window and flash else s
    keys_of_query = keys - keys**2 / (2 * s) if flash and share.shape.causal else keys
    return _latent(share, keys_of_query) if share.shape.kv_latent else _grouped(share, keys_of_query)


def _grouped(share: Share, keys_of_query: float) -> Piece:
    """11·b·s·h + 5·a·s²·b and its norm's 2·b·s·h (Korthikanti et al. 2023, section 4.1).

    Keys and values are narrower with grouped queries.
    """
    shape, parallelism, whole = share.shape, share.parallelism, share.message_bytes
    queries = shape.query_width / parallelism.tp
    keys = max(shape.key_width / parallelism.tp, shape.query_width / shape.heads)  # at least one group on each GPU
    head_size = shape.query_width // shape.heads
    gate = queries * shape.attention_gate
    return Piece(
        kind="dense",
        weights=shape.hidden * (2 * queries + 2 * keys + gate) + shape.all_vectors.attention,
        saved=(
            Saved("norm input", whole, None),
            share.operand("qkv input", whole, "cheap"),
            Saved("queries", share.tensor_bytes(queries)),
            *([Saved("gate and what it multiplies", share.tensor_bytes(2 * gate))] if gate else []),
            Saved("keys and values", 2 * share.tensor_bytes(keys)),
            *_saved_output(share, queries),
            *_saved_scores(share),
            *share.residual_mask(),
        ),
        gradients=share.tensor_bytes(queries + 2 * keys + gate) + whole,
        work=Work(
            matmuls=(
                Matmul(share.tokens, queries + 2 * keys + gate, shape.hidden),
                Matmul(share.tokens, shape.hidden, queries),
            ),
            scores=4 * share.tokens * keys_of_query * queries,
            traffic=(NORM + RESIDUAL) * whole + share.tensor_bytes(3 * gate),
            again=NORM * whole,
            passes=2,
            sent=(*share.reduced, *share.exchanged(2 * share.tensor_bytes(keys))),
        )
        + _unfused(share, head_size, head_size),
    )


def _latent(share: Share, keys_of_query: float) -> Piece:
    """Multi-head latent attention (DeepSeek-V2, section 2.1), with its norm and those of the latent vectors.

    What goes down to the latent vectors is on every GPU of the tensor-parallel group, and is computed there for its
    part of the sequence (as Megatron-LM has it); what goes up, and the heads, are divided. Each head's key has a copy
    of the one with positions that all heads share.
    """
    shape, parallelism, whole = share.shape, share.parallelism, share.message_bytes
    heads, along = shape.heads / parallelism.tp, parallelism.along_sequence
    head_size = shape.head_size or 0
    keys = heads * (head_size + shape.rope_size)  # the width of keys, and of queries
    values = heads * shape.value_size
    latent_width, query_input = shape.query_latent + shape.kv_latent, shape.query_latent or shape.hidden
    down = shape.hidden * (latent_width + shape.rope_size)
    up = query_input * keys + shape.kv_latent * (heads * head_size + values)
    latents = share.tensor_bytes(latent_width) / along
    return Piece(
        kind="dense",
        weights=down + up + values * shape.hidden + latent_width + shape.all_vectors.attention,
        saved=(
            Saved("norm input", whole, None),
            share.operand("latents' input", whole, "cheap"),
            Saved("latents", latents),
            share.operand("latents after their norms", latents, "cheap"),
            Saved("queries", share.tensor_bytes(keys)),
            Saved("keys and values", share.tensor_bytes(keys + values)),
            *_saved_output(share, values),
            *_saved_scores(share),
            *share.residual_mask(),
        ),
        gradients=latents + share.tensor_bytes(2 * keys + values) + whole,
        work=Work(
            matmuls=(
                Matmul(share.tokens / along, latent_width + shape.rope_size, shape.hidden),
                Matmul(share.tokens, keys, query_input),
                Matmul(share.tokens, heads * head_size + values, shape.kv_latent),
                Matmul(share.tokens, shape.hidden, values),
            ),
            scores=2 * share.tokens * keys_of_query * (keys + values),
            traffic=(NORM + RESIDUAL) * whole + NORM * latents,
            again=NORM * (whole + latents),
            passes=3,
            sent=(*share.reduced, *share.exchanged(share.tensor_bytes(keys + values))),
        )
        + _unfused(share, keys / heads, shape.value_size),
    )


def _saved_output(share: Share, width: float) -> list[Saved]:
    """What attention puts out and the projection takes, one tensor unless that is rounded; flash attention saves it."""
    wide = [Saved("attention's output", share.tensor_bytes(width))]
    apart = share.run.attention == "flash" and share.rounded < 1
    return [*wide * apart, share.operand("projection input", share.tensor_bytes(width))]


def _saved_scores(share: Share) -> list[Saved]:
    """What attention saves of its scores: flash attention 4 bytes a row of them (Dao et al. 2022)."""
    value_bytes, scores = share.run.value_bytes, _score_count(share)
    if share.run.attention == "flash":
        return [Saved("row sums of scores", FP32 * share.shape.heads * share.tokens / share.parallelism.tp)]
    saved = [Saved("softmax of scores", value_bytes * scores, "selective")]
    if share.shape.dropout:
        saved.append(Saved("scores' dropout", (value_bytes + MASK) * scores, "selective"))
    return saved


def _score_count(share: Share) -> float:
    return share.shape.heads * share.tokens * share.sequence / share.parallelism.tp


def _unfused(share: Share, key_size: float, value_size: float) -> Work:
    """The two matmuls of a head, and its softmax and dropout, which read and write stored scores."""
    if share.run.attention == "flash":
        return Work()
    value_bytes, dropout, keys = share.run.value_bytes, share.shape.dropout, share.sequence
    heads = share.run.microbatch_size * share.shape.heads / share.parallelism.tp
    queries = keys / share.parallelism.cp
    apart = APART if heads % FUSED_HEADS else 0
    return Work(
        products=(Matmul(queries, keys, key_size, heads), Matmul(queries, value_size, keys, heads)),
        traffic=(2 * value_bytes + dropout * (2 * value_bytes + MASK)) * _score_count(share),
        passes=1 + dropout + apart,
    )
