"""What an estimate starts from beside the GPU: the transformer's shape, how it is divided, and the run."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from optpipe.model.placement import MOST_CHUNKS
from optpipe.model.records import Bytes, Document, Items, Record

Size = Annotated[int, Field(strict=True, ge=1, le=2**30)]
Count = Annotated[int, Field(strict=True, ge=0, le=2**20)]
Numbers = Annotated[int, Field(strict=True, ge=0, le=2**40)]
Degree = Annotated[int, Field(strict=True, ge=1, le=4096)]
Text = Annotated[str, Field(max_length=500)]
Precision = Literal["bf16", "fp8", "mxfp8", "nvfp4", "fp32"]
Overlap = Literal["none", "replicas", "all", "experts"]
Dispatch = Literal["alltoall", "once"]
Attention = Literal["flash", "unfused"]
Parts = Annotated[str, Field(pattern=r"^([*M][-E]?|[-E])$")]
Recompute = Literal["none", "selective", "cheap", "full"]


def _words(value: Any) -> Any:
    """The words of a text, or its letters if it is one word."""
    if not isinstance(value, str):
        return value
    return value.split() if " " in value else list(value)


class Vectors(Record):
    """How many numbers norms and biases have: `layer` in every layer, `attention` and `mlp` beside their matrices,
    `router` beside the router's, `expert` beside those of each expert, and what embedding and head have."""

    layer: Numbers
    attention: Numbers = 0
    mlp: Numbers = 0
    router: Numbers = 0
    expert: Numbers = 0
    embedding: Numbers = 0
    head: Numbers


class StateSpace(Record):
    """A mixer that hands a state of `head_size` x `state` numbers a head from token to token, instead of attention:
    Mamba-2's (Dao and Gu 2024, section 7) or that of the gated delta rule (Yang et al. 2025, section 3).

    `groups` of heads share what writes to the state and what reads it; a convolution over `kernel` tokens is before it.
    """

    kind: Literal["mamba", "delta"]
    heads: Size
    head_size: Size
    groups: Size
    state: Size
    kernel: Size = 4

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.heads % self.groups:
            raise ValueError(f"groups = {self.groups}: must divide heads = {self.heads}")
        return self

    def is_divided_by(self, tp: int) -> bool:
        """Whether so many GPUs have as many heads each, and whole groups or a copy of one."""
        return self.heads % tp == 0 and 0 in (self.groups % tp, tp % self.groups)


class ModuleNames(Record):
    """What a model calls its modules: those of the first stage, a layer without its number, those of the last stage,
    and those without parameters that every stage has."""

    first: Items[Text]
    layer: Text
    last: Items[Text]
    every: Items[Text] = ()


class Transformer(Document):
    """The shape of a transformer.

    `query_groups` are the heads of keys and values, by default as many as `heads`; `head_size` is `hidden / heads` by
    default. A gated MLP has three matrices, others two. With `experts`, layer i has them if `i >= dense_layers` and `i
    + 1` is a multiple of `expert_every`; other layers have an MLP of width `ffn`. `shared_ffn` is the width of the
    expert that every token passes. A token's experts are in `groups_per_token` of `expert_groups`. `sequence` is the
    length in training, None if unknown.

    Without `vectors` each layer has two norms and the head one, and nothing has biases. An embedding of another width
    than `hidden` has a projection to it, and the head one back. With a `window` a query attends to so many tokens, the
    last of them its own; those of `full_layers` attend to all. `left_out` names parts of the model that are in none of
    these fields, `mtp_modules` counts multi-token prediction modules, which only a run with `mtp` has.

    With `kv_latent` attention is multi-head latent (DeepSeek-V2, 2024, section 2.1): keys and values come from a latent
    vector of that width, queries from one of width `query_latent`, or from the hidden state if that is 0. Of each
    head's query and key `head_size` numbers have no position and `rope_size` have, and its value has `value_size`.

    `parts` are those of each layer, with the letters of Megatron-LM's hybrid patterns: `*` attention or `M` the
    `state_space`, then `-` an MLP or `E` experts; one of both may be missing, and has half of `vectors.layer`. With
    `attention_gate` queries have as wide a gate. Experts of an `expert_latent` take and give vectors of this width.

    `modules` are the names in transformers, None if nothing says them.
    """

    WHAT = "transformer"

    name: Text = ""
    source: Text = ""
    layers: Annotated[int, Field(strict=True, ge=1, le=4000)]
    hidden: Size
    ffn: Size
    heads: Size
    vocabulary: Size
    query_groups: Size | None = None
    head_size: Size | None = None
    sequence: Size | None = None
    positions: Count = 0  # learned position embeddings
    embedding_width: Size | None = None
    vectors: Vectors | None = None
    window: Count = 0  # 0: all tokens
    full_layers: Items[Count] = ()
    left_out: Items[Text] = ()
    mtp_modules: Count = 0
    modules: ModuleNames | None = None
    gated: bool = False
    tied: bool = False  # one matrix for the embedding and the head
    causal: bool = True
    dropout: bool = False
    kv_latent: Count = 0
    query_latent: Count = 0
    rope_size: Count = 0
    value_size: Count = 0
    experts: Count = 0
    experts_per_token: Count = 0
    expert_ffn: Count = 0
    shared_ffn: Count = 0
    dense_layers: Count = 0
    expert_every: Size = 1
    expert_latent: Count = 0
    expert_groups: Size = 1
    groups_per_token: Size = 1
    attention_gate: bool = False
    state_space: StateSpace | None = None
    parts: Annotated[Items[Parts], BeforeValidator(_words), Field(max_length=4000)] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.head_size is None and self.hidden % self.heads:
            raise ValueError(f"heads = {self.heads}: must divide hidden = {self.hidden}, or head_size is given")
        if self.heads % self.groups:
            raise ValueError(f"query_groups = {self.groups}: must divide heads = {self.heads}")
        if self.kv_latent and not (self.head_size and self.value_size):
            raise ValueError(f"kv_latent = {self.kv_latent}: needs head_size and value_size")
        if not self.kv_latent and (self.query_latent or self.rope_size or self.value_size):
            raise ValueError("kv_latent = 0: then query_latent, rope_size and value_size are 0, too")
        if self.experts and not (self.expert_ffn and 1 <= self.experts_per_token <= self.experts):
            raise ValueError(f"experts = {self.experts}: needs expert_ffn, and experts_per_token of at most as many")
        if not self.experts and (self.experts_per_token or self.expert_ffn or self.shared_ffn or self.expert_latent):
            raise ValueError("experts = 0: then experts_per_token, expert_ffn, shared_ffn and expert_latent are 0, too")
        if self.experts % self.expert_groups or self.groups_per_token > self.expert_groups:
            raise ValueError(
                f"expert_groups = {self.expert_groups}: must divide experts = {self.experts}, and be at least "
                f"groups_per_token = {self.groups_per_token}"
            )
        if self.experts_per_token > (most := self.experts // self.expert_groups * self.groups_per_token):
            raise ValueError(
                f"experts_per_token = {self.experts_per_token}: {self.groups_per_token} of {self.expert_groups} "
                f"expert_groups have {most} experts"
            )
        if self.kv_latent and self.attention_gate:
            raise ValueError(f"attention_gate = true: expected false with kv_latent = {self.kv_latent}")
        if self.full_layers and not (self.window and max(self.full_layers) < self.layers):
            raise ValueError(f"full_layers = {list(self.full_layers)}: needs a window, and numbers below {self.layers}")
        if self.parts and len(self.parts) != self.layers:
            raise ValueError(f"parts has {len(self.parts)} entries: the model has {self.layers} layers")
        for letter, of in (("M", self.state_space), ("E", self.experts)):
            if not of and any(letter in parts for parts in self.parts):
                raise ValueError(f"parts has {letter}: needs {'state_space' if letter == 'M' else 'experts'}")
        if self.state_space and not any("M" in parts for parts in self.parts):
            raise ValueError("parts has no M: then state_space is left out")
        return self

    @property
    def groups(self) -> int:
        return self.query_groups or self.heads

    @property
    def embedding_matrix(self) -> int:
        """The numbers of the matrix of the embedding, which is the head's, too, if they are tied."""
        return self.vocabulary * (self.embedding_width or self.hidden)

    @property
    def embedding_projection(self) -> int:
        """The numbers of the matrix between embedding and layers, 0 if there is none."""
        return self.embedding_width * self.hidden if self.embedding_width not in (None, self.hidden) else 0

    @property
    def all_vectors(self) -> Vectors:
        return self.vectors or Vectors(layer=2 * self.hidden, head=self.hidden)

    @property
    def query_width(self) -> int:
        """The width of all heads' queries."""
        return self.heads * (self.head_size or self.hidden // self.heads)

    @property
    def key_width(self) -> int:
        """The width of all keys; that of the values is the same."""
        return self.query_width // self.heads * self.groups

    @property
    def up_matrices(self) -> int:
        """The matrices of an MLP that go up to its width: with a gate two."""
        return 2 if self.gated else 1

    def window_of(self, layer: int) -> int:
        """To how many tokens a query of this layer attends, 0 if to all."""
        return 0 if layer in self.full_layers else self.window

    def parts_of(self, layer: int) -> str:
        """The letters of a layer's parts."""
        if self.parts:
            return self.parts[layer]
        sparse = self.experts > 0 and layer >= self.dense_layers and (layer + 1) % self.expert_every == 0
        return "*E" if sparse else "*-"


def _counts(value: Any) -> Any:
    """The numbers of a text such as `9,10,10,9`."""
    try:
        return [int(word) for word in value.split(",")] if isinstance(value, str) else value
    except ValueError:
        raise PydanticCustomError("counts", "numbers with commas between were expected") from None


class Parallelism(Document):
    """How the model is divided among `pp · tp · cp · dp` GPUs.

    Attributes
    ----------
    pp
        Devices of the pipeline.
    tp
        Tensor parallelism.
    cp
        Context parallelism.
    ep
        Expert parallelism, a part of dp · cp, with etp 1 of tp · dp · cp.
    etp
        By how many GPUs each expert is divided, a part of tp, which is the default.
    dp
        Data parallelism.
    zero
        ZeRO stage, 0 to 3: data-parallel ranks share the optimizer state (1), the gradients (2), and the weights (3).
    chunks
        Stages a device.
    shape
        How the stages of a device are placed: looped or v.
    layers
        Transformer layers of each of the pp · chunks stages, such as 9,10,10,9. Default: even, and the first and the
        last stage, which have the embedding and the head, get no layer that is left over.
    mtp_stage
        The stage of multi-token prediction modules; by default the last one, which has the head.
    head_parts
        In how many parts the head's vocabulary is cut; stages get them as they get layers, the last one by default.
    sequence_parallel
        Divide along the sequence what tensor parallelism does not divide (Korthikanti et al. 2023).
    """

    WHAT = "parallelism"

    pp: Degree = 1
    tp: Degree = 1
    cp: Degree = 1
    ep: Degree = 1
    etp: Degree | None = None
    dp: Degree = 1
    zero: Annotated[int, Field(strict=True, ge=0, le=3)] = 0
    chunks: Annotated[int, Field(strict=True, ge=1, le=MOST_CHUNKS)] = 1
    shape: Literal["looped", "v"] = "looped"
    layers: Annotated[Items[Count], BeforeValidator(_counts), Field(min_length=1, max_length=4096)] | None = None
    mtp_stage: Count | None = None
    head_parts: Annotated[int, Field(strict=True, ge=1, le=64)] = 1  # layers of a problem are at most 4096
    sequence_parallel: bool = True

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.tp % self.expert_tp:
            raise ValueError(f"etp = {self.etp}: must divide tp = {self.tp}")
        replicas = self.dp * self.cp
        if self.tp * replicas % (self.ep * self.expert_tp):
            wide = f", or with etp 1 tp · dp · cp = {self.tp * replicas}" if self.expert_tp > 1 else ""
            whole = "dp · cp" if self.expert_tp == self.tp else f"tp · dp · cp{' / etp' * (self.expert_tp > 1)}"
            most = replicas * self.tp // self.expert_tp
            raise ValueError(f"ep = {self.ep}: must divide {whole} = {most}{wide}")
        if self.layers is not None and len(self.layers) != self.stages:
            raise ValueError(f"layers has {len(self.layers)} entries: pp · chunks make {self.stages} stages")
        return self

    @property
    def stages(self) -> int:
        return self.pp * self.chunks

    @property
    def expert_tp(self) -> int:
        """By how many GPUs each expert is divided."""
        return self.etp or self.tp

    @property
    def expert_replicas(self) -> int:
        """How many GPUs of a stage have the same part of the experts."""
        return self.tp * self.cp * self.dp // (self.ep * self.expert_tp)

    @property
    def gpus(self) -> int:
        return self.pp * self.tp * self.cp * self.dp

    @property
    def along_sequence(self) -> int:
        """By how much sequence parallelism divides what tensor parallelism leaves whole."""
        return self.tp if self.sequence_parallel else 1


class RunOptions(Document):
    """What holds for a training run, however many micro-batches it has.

    Attributes
    ----------
    microbatch_size
        Sequences of a micro-batch.
    sequence
        Tokens of a sequence. Default: the preset's.
    precision
        bf16, fp8 (a scale a tensor), mxfp8 (a scale for 32 numbers), nvfp4 (4 bits, a scale for 16) or fp32. Only
        layers' matmuls have 8 or 4 bits; weights, activations, routers and the head have 16. Weights are not there
        in both (`--fp8-param-gather`).
    attention
        flash or unfused.
    fused
        One kernel for a gated activation function and its product; otherwise the function's output is saved, too.
    recompute
        What every backward computes again: selective attention's scores (Korthikanti et al. 2023), cheap also norms,
        activation functions and dropout masks (PipeOffload), full the whole layer.
    levels
        A schedule chooses for every activation which of these levels beyond recompute it takes, or none; else whether
        all of it is computed again.
    gradient_bytes
        Bytes of a gradient.
    fused_gradients
        Matmuls add to the gradients themselves (TransformerEngine, Megatron-LM), and leave autograd an empty gradient
        of each shape of a layer's weights. With them operands are saved with the bits that are computed with, and
        experts' outputs are not saved.
    fused_experts
        One kernel multiplies with all experts' matrices, activates and rounds (TransformerEngine's grouped MLP).
    mtp
        Multi-token prediction modules, beside the head (DeepSeek-V3, section 2.2).
    lora
        Rank of the adapters beside the matrices of layers, which alone are trained; 0: all weights are.
    optimizer_bytes
        Optimizer state, bytes a parameter. Default: Adam's two 32-bit numbers and, if weights have fewer bits, a 32-bit
        copy of them.
    expert_load
        Tokens of the busiest GPU's experts, relative to the mean.
    moe_expert_capacity_factor
        Tokens of a GPU that an expert takes at most, relative to the mean; others are dropped, by whatever policy.
        Default: it takes all.
    moe_pad_expert_input_to_capacity
        Every expert takes exactly so many.
    dispatch
        How tokens reach experts: alltoall sends one copy for each expert; once (DeepEP, HybridEP) one for each GPU,
        over the network one for each node, in the order of the experts.
    overlap
        What a stack sends while it computes: nothing, replicas (gradients beside the last backward; with ZeRO 2 and 3
        half of what an op sends, beside its matmuls), or all, also half of tensor parallelism's collectives; experts,
        without full recomputation also the all-to-all of a forward beside another micro-batch's backward, and of that
        beside the forward.
    """

    WHAT = "run"

    microbatch_size: Size = 1
    sequence: Size | None = None
    precision: Precision = "bf16"
    attention: Attention = "flash"
    fused: bool = True
    recompute: Recompute = "none"
    levels: bool = False
    gradient_bytes: Annotated[int, Field(strict=True, ge=1, le=8)] = 4
    fused_gradients: bool = False
    fused_experts: bool = False
    mtp: Annotated[int, Field(strict=True, ge=0, le=16)] = 0
    lora: Annotated[int, Field(strict=True, ge=0, le=4096)] = 0
    optimizer_bytes: Annotated[int, Field(strict=True, ge=0, le=32)] | None = None
    expert_load: Annotated[float, Field(ge=1, le=1000)] = 1.0
    moe_expert_capacity_factor: Annotated[float, Field(gt=0, le=1000)] | None = None
    moe_pad_expert_input_to_capacity: bool = False
    dispatch: Dispatch = "alltoall"
    overlap: Overlap = "none"


class Run(RunOptions):
    """One training run."""

    microbatches: Annotated[int, Field(strict=True, ge=1, le=2**16)]
    host_memory_bytes: Bytes | None = None  # of each GPU; those of a node share it
    padded: bool = True  # the head's vocabulary, to a multiple of 8 at least, as Megatron-LM does
    keep_received: bool = False  # buffers for messages of all micro-batches, as PyTorch's pipelining up to 2.13 does

    @property
    def value_bytes(self) -> int:
        """Bytes of a weight or of an activation's element; only operands of layers' matmuls may have fewer bits."""
        return 4 if self.precision == "fp32" else 2

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state per parameter."""
        return self.optimizer_bytes if self.optimizer_bytes is not None else 8 if self.precision == "fp32" else 12
