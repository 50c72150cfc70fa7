"""The pieces of a transformer that are never cut: what each computes, saves and holds, on one GPU.

Letters as in the papers: b sequences of s tokens a micro-batch, hidden size h, a heads, t-way tensor parallelism. With
16-bit numbers and an ungated MLP of width 4h a layer saves 34·b·s·h + 5·a·s²·b bytes (Korthikanti et al. 2023, Eq. 1),
20·b·s·h where what is cheap is computed again and scores are never stored (PipeOffload, appendix C).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from optpipe.transformer.records import Parallelism, Run, Transformer
from optpipe.transformer.work import Collective, Matmul, Piece, Saved, Work

FP32, MASK, INDEX = 4, 1, 8  # bytes
NORM, RESIDUAL = 2, 3  # tensors of the width of the model that are read and written
# Megatron-LM's softmax is one kernel where the heads of a micro-batch on a GPU are a multiple of 4 (fused_softmax.py,
# is_kernel_available). Else there are five: to 32 bits, scale, mask, softmax, back.
FUSED_HEADS, APART = 4, 4
LOSS = 5  # times that F of a cross entropy over divided logits reads or writes them in 32 bits (Megatron-LM's)


@dataclass(frozen=True)
class Pieces:
    """All pieces of a transformer as one GPU has them."""

    shape: Transformer
    parallelism: Parallelism
    run: Run
    sequence: int

    @property
    def tokens(self) -> float:
        """b·s, of which context parallelism leaves each GPU its share."""
        return self.run.microbatch_size * self.sequence / self.parallelism.cp

    @cached_property
    def message_bytes(self) -> float:
        """2·b·s·h: what passes from stage to stage."""
        return self._tensor(self.shape.hidden) / self.parallelism.along_sequence

    def _tensor(self, width: float) -> float:
        """Bytes of a tensor that has `width` numbers for each token."""
        return self.run.value_bytes * self.tokens * width

    def _dropout_mask(self) -> list[Saved]:
        """What the dropout before a residual saves, if there is any."""
        mask = MASK * self.message_bytes / self.run.value_bytes
        return [Saved("dropout mask", mask, "cheap")] if self.shape.dropout else []

    @property
    def skipped(self) -> int:
        """By how much a causal kernel divides the scores: flash attention leaves out those of later tokens."""
        return 2 if self.shape.causal and self.run.attention == "flash" else 1

    def all(self) -> list[Piece]:
        """Embedding, layers, head."""
        shape = self.shape
        kinds = [(shape.has_experts(i), shape.window_of(i)) for i in range(shape.layers)]
        layers = {kind: self.layer(*kind) for kind in set(kinds)}
        return [self.embedding(), *(layers[kind] for kind in kinds), self.head()]

    def embedding(self) -> Piece:
        """The embedding: saves the tokens' numbers and its dropout's mask (Korthikanti et al. 2023, section 4.3)."""
        shape, t = self.shape, self.parallelism.tp
        mask = MASK * self.message_bytes / self.run.value_bytes if shape.dropout else 0.0
        return Piece(
            kind="embedding",
            weights=shape.embedding_matrix / t
            + shape.positions * shape.hidden
            + shape.embedding_projection
            + shape.all_vectors.embedding,
            expert_weights=0.0,
            saved=(Saved("tokens", INDEX * self.tokens, None, operand=True), Saved("dropout mask", mask, None)),
            gradients=self.message_bytes,
            work=Work(matmuls=self._projection, traffic=2 * self.message_bytes, passes=2, sent=self._reduced),
        )

    def head(self) -> Piece:
        """Norm, projection and cross entropy, which keeps its logits in 32 bits: 4·s·b·h + 4·s·b·v bytes.

        Korthikanti et al. 2023, section 4.3. Of tied matrices this is the copy on the last stage.
        """
        shape, tp, value_bytes = self.shape, self.parallelism.tp, self.run.value_bytes
        logits = self.tokens * shape.vocabulary / tp
        return Piece(
            kind="head",
            weights=shape.embedding_matrix / tp + shape.embedding_projection + shape.all_vectors.head,
            expert_weights=0.0,
            saved=(
                Saved("norm input", self.message_bytes, None),
                Saved("head input", self.message_bytes, None, operand=True),
                Saved("logits", FP32 * logits, None),
            ),
            gradients=value_bytes * logits,
            work=Work(
                matmuls=(
                    Matmul(self.tokens, shape.vocabulary / tp, shape.embedding_width or shape.hidden),
                    *self._projection,
                ),
                traffic=2 * self.message_bytes + (value_bytes + LOSS * FP32) * logits,
                passes=1 + LOSS,
                sent=self._reduced,
            ),
        )

    def layer(self, experts: bool, window: int = 0) -> Piece:
        """One transformer layer: attention, to `window` tokens if that is not 0, and an MLP or experts, each with a
        norm before it."""
        mlp = self._experts() if experts else self._mlp(self.shape.ffn)
        keys = self._keys(window)
        attention = self._latent_attention(keys) if self.shape.kv_latent else self._attention(keys)
        return Piece(
            kind="expert" if experts else "dense",
            weights=attention.weights + mlp.weights + self.shape.all_vectors.layer,
            expert_weights=mlp.expert_weights,
            saved=(*attention.saved, *mlp.saved),
            gradients=attention.gradients + mlp.gradients,
            work=attention.work + mlp.work,
        )

    def _keys(self, window: int) -> float:
        """To how many keys a query attends on average, those counted that the kernel computes in vain.

        Flash attention leaves out those of later tokens, and those before the window: of w tokens the first w queries
        have fewer, w - w²/2s on average. Unfused attention computes all.
        """
        s, flash = self.sequence, self.run.attention == "flash"
        keys = min(window, s) if window and flash else s
        return keys - keys**2 / (2 * s) if flash and self.shape.causal else keys

    def _attention(self, keys_of_query: float) -> Piece:
        """11·b·s·h + 5·a·s²·b and its norm's 2·b·s·h (Korthikanti et al. 2023, section 4.1).

        Keys and values are narrower with grouped queries.
        """
        shape, parallelism, whole = self.shape, self.parallelism, self.message_bytes
        queries = shape.query_width / parallelism.tp
        keys = max(shape.key_width / parallelism.tp, shape.query_width / shape.heads)  # at least one group on each GPU
        weights, head_size = shape.hidden * (2 * queries + 2 * keys), shape.query_width // shape.heads
        saved = [
            Saved("norm input", whole, None),
            Saved("qkv input", whole, "cheap", operand=True),
            Saved("queries", self._tensor(queries)),
            Saved("keys and values", 2 * self._tensor(keys)),
            Saved("projection input", self._tensor(queries), operand=True),
            *self._scores(),
            *self._dropout_mask(),
        ]
        return Piece(
            kind="dense",
            weights=weights,
            expert_weights=0.0,
            saved=tuple(saved),
            gradients=self._tensor(queries + 2 * keys) + whole,
            work=Work(
                matmuls=(
                    Matmul(self.tokens, queries + 2 * keys, shape.hidden),
                    Matmul(self.tokens, shape.hidden, queries),
                ),
                scores=4 * self.tokens * keys_of_query * queries,
                traffic=(NORM + RESIDUAL) * whole,
                again=NORM * whole,
                passes=2,
                sent=(*self._reduced, *self._exchanged(2 * self._tensor(keys))),
            )
            + self._unfused(head_size, head_size),
        )

    def _latent_attention(self, keys_of_query: float) -> Piece:
        """Multi-head latent attention (DeepSeek-V2, section 2.1), with its norm and those of the latent vectors.

        What goes down to the latent vectors is on every GPU of the tensor-parallel group, and is computed there for its
        part of the sequence (as Megatron-LM has it); what goes up, and the heads, are divided. Each head's key has a
        copy of the one with positions that all heads share.
        """
        shape, parallelism, whole = self.shape, self.parallelism, self.message_bytes
        heads, along = shape.heads / parallelism.tp, parallelism.along_sequence
        head_size = shape.head_size or 0
        keys = heads * (head_size + shape.rope_size)  # the width of keys, and of queries
        values = heads * shape.value_size
        latent_width = shape.query_latent + shape.kv_latent
        down = shape.hidden * (latent_width + shape.rope_size)
        up = (shape.query_latent or shape.hidden) * keys + shape.kv_latent * (heads * head_size + values)
        out = values * shape.hidden
        latents = self._tensor(latent_width) / along
        return Piece(
            kind="dense",
            weights=down + up + out + latent_width,
            expert_weights=0.0,
            saved=(
                Saved("norm input", whole, None),
                Saved("latents' input", whole, "cheap", operand=True),
                Saved("latents", latents),
                Saved("latents after their norms", latents, "cheap", operand=True),
                Saved("queries", self._tensor(keys)),
                Saved("keys and values", self._tensor(keys + values)),
                Saved("projection input", self._tensor(values), operand=True),
                *self._scores(),
                *self._dropout_mask(),
            ),
            gradients=latents + self._tensor(2 * keys + values) + whole,
            work=Work(
                matmuls=(
                    Matmul(self.tokens / along, latent_width + shape.rope_size, shape.hidden),
                    Matmul(self.tokens, keys, shape.query_latent or shape.hidden),
                    Matmul(self.tokens, heads * head_size + values, shape.kv_latent),
                    Matmul(self.tokens, shape.hidden, values),
                ),
                scores=2 * self.tokens * keys_of_query * (keys + values),
                traffic=(NORM + RESIDUAL) * whole + NORM * latents,
                again=NORM * (whole + latents),
                passes=3,
                sent=(*self._reduced, *self._exchanged(self._tensor(keys + values))),
            )
            + self._unfused(keys / heads, shape.value_size),
        )

    def _scores(self) -> list[Saved]:
        """What attention saves of its scores: flash attention 4 bytes a row of them (Dao et al. 2022)."""
        value_bytes = self.run.value_bytes
        if self.run.attention == "flash":
            return [Saved("row sums of scores", FP32 * self.shape.heads * self.tokens / self.parallelism.tp)]
        saved = [Saved("softmax of scores", value_bytes * self._score_count, "selective")]
        if self.shape.dropout:
            saved.append(Saved("scores' dropout", (value_bytes + MASK) * self._score_count, "selective"))
        return saved

    @property
    def _score_count(self) -> float:
        return self.shape.heads * self.tokens * self.sequence / self.parallelism.tp

    def _unfused(self, key_size: float, value_size: float) -> Work:
        """The two matmuls of a head, and its softmax and dropout, which read and write stored scores."""
        if self.run.attention == "flash":
            return Work()
        value_bytes, dropout, keys = self.run.value_bytes, self.shape.dropout, self.sequence
        heads = self.run.microbatch_size * self.shape.heads / self.parallelism.tp
        queries = keys / self.parallelism.cp
        apart = APART if heads % FUSED_HEADS else 0
        return Work(
            products=(Matmul(queries, keys, key_size, heads), Matmul(queries, value_size, keys, heads)),
            traffic=(2 * value_bytes + dropout * (2 * value_bytes + MASK)) * self._score_count,
            passes=1 + dropout + apart,
        )

    def _mlp(self, width: int) -> Piece:
        """19·b·s·h and its norm's 2·b·s·h, if the width is 4h and there is no gate."""
        shape, whole = self.shape, self.message_bytes
        local_width, matrices = width / self.parallelism.tp, shape.up_matrices + 1
        middle, weights = self._tensor(local_width), shape.hidden * local_width * matrices
        saved = [Saved("norm input", whole), Saved("MLP input", whole, "cheap", operand=True)]
        saved += [*self._between(local_width * self.tokens), *self._dropout_mask()]
        return Piece(
            kind="dense",
            weights=weights + shape.all_vectors.mlp,
            expert_weights=0.0,
            saved=tuple(saved),
            gradients=shape.up_matrices * middle + whole,
            work=Work(
                matmuls=(
                    Matmul(self.tokens, shape.up_matrices * local_width, shape.hidden),
                    Matmul(self.tokens, shape.hidden, local_width),
                ),
                traffic=(NORM + RESIDUAL) * whole + matrices * middle,
                again=NORM * whole + matrices * middle,
                passes=3,
                sent=self._reduced,
            ),
        )

    def _experts(self) -> Piece:
        """Router, experts and the shared expert. Each token is sent to `experts_per_token` experts and back.

        What comes back is weighted by the router and stays saved for the weights' gradients.
        """
        shape, parallelism, whole = self.shape, self.parallelism, self.message_bytes
        hidden, tp, along = shape.hidden, parallelism.tp, parallelism.along_sequence
        matrices, value_bytes = shape.up_matrices + 1, self.run.value_bytes
        sent = self.tokens * shape.experts_per_token * self.run.expert_load  # tokens to this GPU's experts
        sent_bytes = value_bytes * sent * hidden
        numbers = shape.expert_ffn * sent / tp + shape.shared_ffn * self.tokens / tp  # behind the up matrices
        middle = value_bytes * numbers
        local = shape.experts / parallelism.ep
        over_experts = Collective("experts", 2 * sent_bytes * (1 - 1 / parallelism.ep) / tp, 2 * (parallelism.ep - 1))
        exchanged = (over_experts,) if parallelism.ep > 1 else ()
        saved = [
            Saved("norm input", whole),
            Saved("router's input", whole, "cheap", operand=True),
            Saved("router's output", FP32 * self.tokens * shape.experts / along),
            Saved("experts' input", sent_bytes, operand=True),
            *self._between(numbers),
            Saved("experts' output", self._tensor(shape.experts_per_token * hidden) / along),
        ]
        return Piece(
            kind="expert",
            weights=hidden * shape.experts + hidden * shape.shared_ffn * matrices / tp + shape.all_vectors.router,
            expert_weights=shape.experts
            / parallelism.ep
            * (hidden * shape.expert_ffn * matrices / tp + shape.all_vectors.expert),
            saved=tuple(saved),
            gradients=shape.up_matrices * middle + sent_bytes + (whole if shape.shared_ffn else 0.0),
            work=Work(
                matmuls=(
                    Matmul(self.tokens / along, shape.experts, hidden),
                    Matmul(sent / local, shape.up_matrices * shape.expert_ffn / tp, hidden, local),
                    Matmul(sent / local, hidden, shape.expert_ffn / tp, local),
                    *self._shared_expert,
                ),
                traffic=(NORM + RESIDUAL) * whole + 4 * sent_bytes + matrices * middle,
                again=NORM * whole + matrices * middle,
                passes=5,
                sent=(*self._reduced, *exchanged),
            ),
        )

    def _between(self, numbers: float) -> list[Saved]:
        """The activation function's inputs, with a gate two, and its output, which the last matrix takes."""
        size = self.run.value_bytes * numbers
        unfused = [Saved("gate", size, "cheap")] if self.shape.gated and not self.run.fused else []
        return [
            *unfused,
            Saved("activation function's input", self.shape.up_matrices * size),
            Saved("activation function's output", size, "cheap", operand=True),
        ]

    @property
    def _shared_expert(self) -> tuple[Matmul, ...]:
        shape = self.shape
        if not shape.shared_ffn:
            return ()
        width = shape.shared_ffn / self.parallelism.tp
        return (
            Matmul(self.tokens, shape.up_matrices * width, shape.hidden),
            Matmul(self.tokens, shape.hidden, width),
        )

    @property
    def _projection(self) -> tuple[Matmul, ...]:
        """Between an embedding, or a head, of another width and the layers."""
        shape = self.shape
        if not shape.embedding_projection:
            return ()
        return (Matmul(self.tokens, shape.hidden, shape.embedding_width or shape.hidden),)

    @cached_property
    def _reduced(self) -> tuple[Collective, ...]:
        """An all-reduce of a GPU's output over the tensor-parallel ring, in 2(t - 1) steps.

        Patarasuk and Yuan 2009: 2(t - 1)/t of its bytes; with sequence parallelism, an all-gather and a reduce-scatter.
        """
        t = self.parallelism.tp
        return (Collective("tensor", 2 * (t - 1) / t * self._tensor(self.shape.hidden), 2 * (t - 1)),) if t > 1 else ()

    def _exchanged(self, nbytes: float) -> tuple[Collective, ...]:
        """Keys and values, which go around the context-parallel ring."""
        further = self.parallelism.cp - 1
        return (Collective("context", further * nbytes, further),) if further else ()
