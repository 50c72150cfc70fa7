"""The pieces of a transformer that are never cut: what each computes, saves and holds, on one GPU.

With 16-bit numbers and an ungated MLP of width 4h a layer saves 34·b·s·h + 5·a·s²·b bytes (Korthikanti et al. 2023, Eq.
1), 20·b·s·h where what is cheap is computed again and scores are never stored (PipeOffload, appendix C). Letters as in
`optpipe.transformer.work`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from math import ceil
from operator import add

from optpipe.transformer.attention import attention
from optpipe.transformer.records import Dispatch
from optpipe.transformer.state_space import state_space
from optpipe.transformer.work import FP32, NORM, RESIDUAL, Collective, Matmul, Piece, Routing, Saved, Share, Work

INDEX = 8  # bytes of a token's number
# Bytes that are read and written to put tokens in order: before they leave for experts and when they have come, and on
# the way back; where the kernels that send do it, once on each way.
ORDERED: dict[Dispatch, int] = {"alltoall": 8, "once": 4}
BIASES = 4  # times that outputs of experts with biases are read or written to add them: each expert's, then all joined
LOSS = 5  # times that F of a cross entropy over divided logits reads or writes them in 32 bits (Megatron-LM's)


def all_pieces(share: Share) -> list[Piece]:
    """Embedding, layers, multi-token prediction modules if there are any, head."""
    shape = share.shape
    kinds = [(shape.parts_of(i), shape.window_of(i)) for i in range(shape.layers)]
    layers = {kind: _layer(share, *kind) for kind in set(kinds)}
    heads = _heads(share)
    if share.run.mtp:
        parts, window = kinds[-1]
        heads = [_prediction(share, _layer(share, f"*{parts.strip('*M')}", window)), _again(heads[0], share.run.mtp)]
    pieces = [_embedding(share), *(layers[kind] for kind in kinds), *heads]
    return [_adapted(piece, share.run.lora) for piece in pieces] if share.run.lora else pieces


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


def _heads(share: Share) -> list[Piece]:
    """Norm, projection and cross entropy, which keeps its logits in 32 bits: 4·s·b·h + 4·s·b·v bytes.

    Korthikanti et al. 2023, section 4.3. Of tied matrices this is the copy on the last stage. In parts each has some of
    the vocabulary, and hands on the head's input and, for each token, the sum of its logits' powers (Yeung et al. 2024,
    "Balancing Pipeline Parallelism with Vocabulary Parallelism", whose parts work side by side).
    """
    shape, tp, value_bytes, parts = (
        share.shape,
        share.parallelism.tp,
        share.run.value_bytes,
        share.parallelism.head_parts,
    )
    vocabulary, whole = shape.vocabulary / tp / parts, share.message_bytes
    unaligned = not share.run.padded and shape.vocabulary % 8 > 0
    logits = share.tokens * vocabulary
    part = Piece(
        kind="head",
        weights=shape.embedding_matrix / tp / parts,
        saved=(Saved("head input", whole, None, operand=True), Saved("logits", FP32 * logits, None)),
        gradients=value_bytes * logits,
        work=Work(
            matmuls=(
                Matmul(share.tokens, vocabulary, shape.embedding_width or shape.hidden, wide=True, unaligned=unaligned),
            ),
            traffic=(value_bytes + LOSS * FP32) * logits,
            passes=LOSS,
            sent=share.reduced,
        ),
    )
    first = replace(
        part,
        weights=part.weights + shape.embedding_projection + shape.all_vectors.head,
        saved=(Saved("norm input", whole, None), *part.saved),
        work=part.work + Work(matmuls=_projection(share), traffic=2 * whole, passes=1),
    )
    return [first, *[part] * (parts - 1)]


def _prediction(share: Share, layer: Piece) -> Piece:
    """Multi-token prediction modules: each two norms, a matrix of 2h to h, a layer; the head is used again for each.

    DeepSeek-V3 (2024), section 2.2. Of the embedding this has a copy, which a device that has the embedding, too, has
    once. Nothing of them is computed again. The matrix is divided over its columns (Megatron-core 0.16.1): F gathers
    2h and h, B gathers h and scatters 2h; without sequence parallelism F gathers h, and B reduces 2h everywhere.
    """
    shape, whole, modules, tp = share.shape, share.message_bytes, share.run.mtp, share.parallelism.tp
    widths = 3.0 if share.parallelism.sequence_parallel else 2.5  # that F and B send on average
    sent = Collective("tensor", widths * (tp - 1) / tp * share.tensor_bytes(shape.hidden), 2 * (tp - 1))
    joined = Work(
        matmuls=(Matmul(share.tokens, shape.hidden / tp, 2 * shape.hidden),),
        traffic=2 * NORM * whole,
        passes=3,
        sent=(sent,) if tp > 1 else (),
    )
    saved = (Saved("norms' inputs", 2 * whole), share.operand("projection's input", 2 * whole))
    kept = tuple(replace(each, dropped_by=None) for each in (*saved, *layer.saved))
    copied, vectors = shape.embedding_matrix / tp, 2 * shape.hidden + shape.all_vectors.head
    return Piece(
        kind="prediction",
        weights=copied + modules * (layer.weights + 2 * shape.hidden**2 / tp + vectors),
        expert_weights=modules * layer.expert_weights,
        saved=modules * kept,
        gradients=modules * (layer.gradients + share.tensor_bytes(shape.hidden / tp)),
        work=reduce(add, modules * [joined + layer.work]),
    )


def _again(head: Piece, modules: int) -> Piece:
    """The head, used once more for each multi-token prediction module."""
    times = 1 + modules
    return replace(
        head, saved=times * head.saved, gradients=times * head.gradients, work=reduce(add, times * [head.work])
    )


def _adapted(piece: Piece, rank: int) -> Piece:
    """The piece with adapters of this rank beside its matrices, which alone are trained (Hu et al. 2021, section 4)."""
    frozen = [each._replace(frozen=True) for each in piece.work.matmuls]
    adapted = [each for each in piece.work.matmuls if not each.wide]
    pairs = [(each._replace(columns=rank), each._replace(depth=rank)) for each in adapted]
    trained = sum(rank * (each.depth + each.columns) for each in adapted)
    matmuls = (*frozen, *(each for pair in pairs for each in pair))
    return replace(piece, weights=piece.weights + trained, trained=trained, work=replace(piece.work, matmuls=matmuls))


def _layer(share: Share, parts: str, window: int) -> Piece:
    """One transformer layer of these parts, with attention to `window` tokens if that is not 0.

    What it takes is there until its backward, whatever is computed again.
    """
    of: dict[str, Callable[[Share], Piece]] = {"M": state_space, "-": _mlp, "E": _experts}
    made = [attention(share, window) if letter == "*" else of[letter](share) for letter in parts]
    taken, *saved = (tensor for each in made for tensor in each.saved)
    return Piece(
        kind="expert" if "E" in parts else "dense",
        weights=sum(each.weights for each in made) + len(parts) / 2 * share.shape.all_vectors.layer,
        expert_weights=sum(each.expert_weights for each in made),
        saved=(replace(taken, dropped_by=None), *saved),
        gradients=sum(each.gradients for each in made),
        work=reduce(add, (each.work for each in made)),
    )


def _mlp(share: Share) -> Piece:
    """19·b·s·h and its norm's 2·b·s·h, if the width is 4h and there is no gate (Korthikanti et al. 2023)."""
    shape, whole = share.shape, share.message_bytes
    local_width, matrices = shape.ffn / share.parallelism.tp, shape.up_matrices + 1
    middle = share.tensor_bytes(local_width)
    return Piece(
        kind="dense",
        weights=shape.hidden * local_width * matrices + shape.all_vectors.mlp,
        saved=(
            Saved("norm input", whole),
            share.operand("MLP input", whole, "cheap"),
            *_saved_between(share, local_width * share.tokens),
            *share.residual_mask(),
        ),
        gradients=shape.up_matrices * middle + whole,
        work=Work(
            matmuls=_up_and_down(share, local_width, share.tokens, shape.up_matrices),
            traffic=(NORM + RESIDUAL) * whole + matrices * middle,
            again=NORM * whole + matrices * middle,
            passes=3,
            sent=share.reduced,
        ),
    )


def _experts(share: Share) -> Piece:
    """Router, experts and the shared expert. Each token is sent to `experts_per_token` experts and back.

    What comes back is weighted by the router and stays saved for the weights' gradients; Megatron-core's weights
    multiply in the activation function instead (0.16.1, experts.py).
    """
    shape, parallelism, whole = share.shape, share.parallelism, share.message_bytes
    tp, ep, along = parallelism.tp, parallelism.ep, parallelism.along_sequence
    hidden, latent = shape.expert_latent or shape.hidden, shape.expert_latent
    matrices, value_bytes, etp = shape.up_matrices + 1, share.run.value_bytes, parallelism.expert_tp
    # Tokens to this GPU's experts; of undivided experts a GPU gets a share of them.
    load = _load(share)
    sent = share.tokens * shape.experts_per_token * load * etp / tp
    sent_bytes = value_bytes * sent * hidden
    routed, shared = shape.expert_ffn * sent / etp, shape.shared_ffn * share.tokens / tp  # behind the up matrices
    middle, local, whole_kernel = value_bytes * (routed + shared), shape.experts / ep, share.run.fused_experts
    outputs = value_bytes * sent * (shape.up_matrices * shape.expert_ffn / etp + hidden)
    biased = BIASES * outputs if shape.all_vectors.expert else 0.0
    activated = value_bytes * shape.shared_ffn * share.tokens / tp if whole_kernel else middle
    copies, groups = shape.experts_per_token, shape.expert_groups
    routing = Routing(shape.experts, copies, groups, min(copies, shape.groups_per_token))
    once = share.run.dispatch == "once"
    over_experts = Collective("experts", 2 * sent_bytes * (1 - 1 / ep) / etp, 2, routing if once else None)
    # Each part of an expert gets what came for the others, and sums what goes back (Megatron-LM's token_dispatcher.py).
    gathered = sent_bytes * (ep * routing.reached(ep) / copies if once else 1.0)
    divided = Collective("tensor", 2 * (etp - 1) / etp * gathered, 2 * (etp - 1))
    # To a GPU's own tokens the mean comes back, of padded experts also what is empty.
    back = copies * (load if share.run.moe_pad_expert_input_to_capacity else min(1.0, load))
    return Piece(
        kind="expert",
        weights=shape.hidden * (shape.experts + shape.shared_ffn * matrices / tp + 2 * latent)
        + shape.all_vectors.router,
        expert_weights=local * (hidden * shape.expert_ffn * matrices / etp + shape.all_vectors.expert),
        saved=(
            Saved("norm input", whole),
            Saved("router's input", whole, "cheap", operand=True),
            Saved("router's output", FP32 * share.tokens * shape.experts / along),
            share.operand("experts' input", sent_bytes),
            *_saved_between(share, routed),
            *(_saved_between(share, shared) if shared else []),
            Saved("experts' output", share.tensor_bytes(back * hidden) / along * (not share.run.fused_gradients)),
            *([share.operand("latents", share.tensor_bytes(latent) / along)] if latent else []),
        ),
        gradients=shape.up_matrices * middle
        + sent_bytes
        + (whole if shape.shared_ffn or latent else 0.0)
        + share.tensor_bytes(latent) / along,
        work=Work(
            matmuls=(
                Matmul(share.tokens / along, shape.experts, shape.hidden, wide=True),
                *_up_and_down(share, latent, share.tokens / along, up_matrices=1),
                Matmul(sent / local, shape.up_matrices * shape.expert_ffn / etp, hidden, local),
                Matmul(sent / local, hidden, shape.expert_ffn / etp, local),
                *_up_and_down(share, shape.shared_ffn / tp, share.tokens, shape.up_matrices),
            ),
            traffic=(NORM + RESIDUAL) * whole
            + ORDERED[share.run.dispatch] * sent_bytes
            + matrices * activated
            + biased,
            again=NORM * whole + matrices * middle,
            passes=5,
            sent=(
                *(share.reduced if shape.shared_ffn else ()),
                *((divided,) if etp > 1 else ()),
                *((over_experts,) if ep > 1 else ()),
            ),
        ),
    )


def _load(share: Share) -> float:
    """Tokens of the busiest GPU's experts over the mean, of which each GPU drops its own (Megatron-core 0.16.1)."""
    run, factor = share.run, share.run.moe_expert_capacity_factor
    if factor is None:
        return run.expert_load
    mean = share.tokens / share.parallelism.along_sequence * share.shape.experts_per_token / share.shape.experts
    most = ceil(factor * mean) / mean
    return most if run.moe_pad_expert_input_to_capacity else min(run.expert_load, most)


def _up_and_down(share: Share, width: float, tokens: float, up_matrices: int) -> tuple[Matmul, ...]:
    """The matmuls of so many tokens with matrices between the model's width and this one, which may be 0."""
    hidden = share.shape.hidden
    return (Matmul(tokens, up_matrices * width, hidden), Matmul(tokens, hidden, width)) if width else ()


def _saved_between(share: Share, numbers: float) -> list[Saved]:
    """The activation function's inputs, with a gate two, and its output, which the last matrix takes."""
    shape, size = share.shape, share.run.value_bytes * numbers
    return [
        *([Saved("gate", size, "cheap")] if shape.gated and not share.run.fused else []),
        Saved("activation function's input", shape.up_matrices * size),
        share.operand("activation function's output", size, "cheap"),
    ]


def _projection(share: Share) -> tuple[Matmul, ...]:
    """Between an embedding, or a head, of another width and the layers."""
    shape = share.shape
    if not shape.embedding_projection:
        return ()
    return (Matmul(share.tokens, shape.hidden, shape.embedding_width or shape.hidden, wide=True),)
