"""Reads the shape of a transformer from a Hugging Face `config.json`, by transformers itself.

transformers fills in what a config leaves out and makes the model on the meta device, where parameters have shapes and
no bytes. The shape is read from both; it must have exactly the model's parameters.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from optpipe.errors import InputError, shown
from optpipe.files import parse_json
from optpipe.transformer.estimate import estimate
from optpipe.transformer.presets import GPUS
from optpipe.transformer.records import ModuleNames, Parallelism, Run, Transformer, Vectors

MOST_LAYERS = 4000  # of a model, as of a `Transformer`
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
SHARED = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
STATE_SPACE = {  # as Nemotron-H, Granite 4 and Qwen3-Next call them
    "heads": ("mamba_num_heads", "mamba_n_heads", "linear_num_value_heads"),
    "head_size": ("mamba_head_dim", "mamba_d_head", "linear_value_head_dim"),
    "groups": ("n_groups", "mamba_n_groups", "linear_num_key_heads"),
    "state": ("ssm_state_size", "mamba_d_state", "linear_key_head_dim"),
    "kernel": ("conv_kernel", "mamba_d_conv", "linear_conv_kernel_dim"),
}
MTP = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules", "mtp_num_hidden_layers")
DROPOUT = ("resid_pdrop", "hidden_dropout", "dropout", "residual_dropout")
NO_PARTS = {"quantization_config", "generation_config", "compression_config", "text_config"}
HEADED = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")  # of architectures that give logits of tokens


def read(text: str | bytes, what: str = "config") -> Transformer:
    """The shape that a `config.json` describes. `sequence` stays None: a config has the longest sequences, not
    those in training.

    Raises InputError if the text is not JSON, transformers cannot make such a model, or the model has parameters that a
    `Transformer` does not have.
    """
    whole = parse_json(text, what)
    if not isinstance(whole, dict):
        raise InputError(f"{what}: a config is an object with fields such as hidden_size")
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise InputError(f"{what}: transformers reads a config: pip install 'optpipe[models]'") from None
    try:
        fields = _Model(whole, what).fields()
    except AttributeError as error:  # models without attention have no heads
        raise _NotModelledError(f"{what}: {_shown(error)}: it is not modelled") from None
    if "text_config" in whole:  # in the whole model the names are others
        fields |= {"modules": None}
    text_config = whole.get("text_config")
    found = (text_config if isinstance(text_config, dict) else whole).get
    named: dict[str, Any] = {
        "name": _shown(whole.get("_name_or_path") or whole.get("model_type")),
        "source": what[:500],
    }
    named |= {"mtp_modules": next((value for name in MTP if (value := found(name))), 0)}
    return Transformer.from_dict(fields | named | {"left_out": tuple(_left_out(whole))}, what)


class _NotModelledError(InputError):
    """A `Transformer` cannot have all of the model."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}; optpipe profile --model measures a model that can be cut into stages")


class _Group:
    """Some parameters of a layer: of matrices, and of norms, biases and the like."""

    def __init__(self, parameters: Sequence[tuple[str, Any]]) -> None:
        self.matrices = self.vectors = self.widest = 0
        for name, parameter in parameters:
            if parameter.ndim == 1 or 1 in parameter.shape or "norm" in name or name.endswith("bias"):
                self.vectors += parameter.numel()
            else:
                self.matrices += parameter.numel()
                self.widest = max(self.widest, *parameter.shape)


class _Layer:
    """The parameters of one layer of a model: `attention` with all norms, `mlp` with router and shared experts, and
    `experts`."""

    def __init__(self, module: Any) -> None:
        self.parameters = dict(module.named_parameters())
        self.shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        mixer, attention = self.owner(".A_log"), self.owner(".q_proj.weight")
        groups: dict[str, list[tuple[str, Any]]] = {"attention": [], "mixer": [], "mlp": [], "experts": []}
        for name, parameter in self.parameters.items():
            *path, _ = name.split(".")
            weight: Any = self.parameters.get(".".join((*path, "weight")), parameter)
            is_vector = max(weight.ndim, parameter.ndim) == 1
            in_attention = is_vector or any("attn" in part or "attention" in part for part in path)
            in_attention |= bool(attention) and name.startswith(f"{attention}.")
            group = "experts" if "experts" in path else "attention" if in_attention else "mlp"
            groups["mixer" if mixer and name.startswith(f"{mixer}.") else group].append((name, parameter))
        self.attention, self.mixer, self.mlp, self.experts = map(_Group, groups.values())
        first = "M" if mixer else "*" if self.attention.matrices else ""
        self.parts = first + ("E" if self.experts.matrices else "-" if self.mlp.matrices else "")

    def owner(self, ending: str) -> str:
        """The module of the first parameter whose name ends so."""
        return next((name.removesuffix(ending) for name in self.shapes if name.endswith(ending)), "")


class _Model:
    """A model of transformers on the meta device, and its config.

    Raises `InputError` if transformers cannot make it, or it has no list of layers.
    """

    def __init__(self, whole: dict[str, Any], what: str) -> None:
        from torch.nn import ModuleList

        self._what = what
        for each in (whole, whole.get("text_config")):
            layers = each.get("num_hidden_layers") if isinstance(each, dict) else None
            if isinstance(layers, int) and layers > MOST_LAYERS:
                raise InputError(f"{what}: num_hidden_layers = {layers}: at most {MOST_LAYERS} are supported")
        try:
            self.config, self._model, self._parameters = _made(whole)
        except Exception as error:  # whatever their code raises for a wrong value
            reason = _shown(str(error).partition("\n")[0])
            raise InputError(f"{what}: transformers makes no causal language model of it: {reason}") from None
        if self._value("is_encoder_decoder"):
            raise InputError(f"{what}: is_encoder_decoder = True: models with an encoder are not modelled")
        count, modules = self.config.num_hidden_layers, self._model.base_model.modules()
        lists = [each for each in modules if isinstance(each, ModuleList) and len(each) == count]
        if not lists:
            raise _NotModelledError(f"{what}: the model has no list of {count} layers: it is not modelled")
        self._list, self.layers = lists[0], [_Layer(each) for each in lists[0]]
        first_of_each = {layer.parts: layer for layer in reversed(self.layers)}
        if any(layer.shapes != first_of_each[layer.parts].shapes for layer in self.layers):
            raise _NotModelledError(f"{what}: its layers differ in more than experts: that is not modelled")

    def _with(self, part: str) -> _Layer | None:
        """The first layer that has this part."""
        return next((layer for layer in self.layers if part in layer.parts), None)

    def fields(self) -> dict[str, Any]:
        """The fields of its `Transformer`. Raises InputError if it has parts that are not modelled."""
        config, hidden = self.config, self.config.hidden_size
        embedding, head = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        width = embedding.weight.shape[1]
        fields = {
            "layers": len(self.layers),
            "hidden": hidden,
            "heads": config.num_attention_heads,
            "vocabulary": config.vocab_size,
            "tied": head.weight is embedding.weight,
            "dropout": any(self._value(name) for name in DROPOUT),
            "embedding_width": width if width != hidden else None,
            "causal": not self._value("use_bidirectional_attention"),
            "modules": self._modules(),
            "positions": _Group(self._outside("position", "wpe")).matrices // hidden,
            **self._attention(),
            **self._window(),
            **self._state_space(),
            **self._experts(),
        }
        fields |= self._mlp(fields)
        fields["vectors"] = self._vectors(fields)
        shape = Transformer.from_dict(fields, self._what)
        modelled = estimate(shape, Parallelism(), GPUS["H100"], Run(microbatches=1, sequence=1)).parameters
        if modelled != self._parameters:
            counts = f"{modelled:,} of its {self._parameters:,} parameters"
            raise _NotModelledError(f"{self._what}: {counts} would be modelled: it has other parts")
        return fields

    def _value(self, *names: str) -> Any:
        """The config's value of the first of these names that has one; None if none has."""
        return next((value for name in names if (value := getattr(self.config, name, None)) is not None), None)

    def _attention(self) -> dict[str, Any]:
        config, hidden, heads = self.config, self.config.hidden_size, self.config.num_attention_heads
        if self._value("kv_lora_rank"):  # multi-head latent attention: all heads have keys of their own
            return {
                "kv_latent": config.kv_lora_rank,
                "query_latent": config.q_lora_rank or 0,
                "head_size": config.qk_nope_head_dim,
                "rope_size": config.qk_rope_head_dim,
                "value_size": config.v_head_dim,
            }
        size, layer = self._value("head_dim") or hidden // heads, self._with("*")
        if layer is None:
            raise _NotModelledError(f"{self._what}: no layer has attention without a state: it is not modelled")
        queries = layer.shapes.get(f"{layer.owner('.q_proj.weight')}.q_proj.weight", (0,))[0]
        gated = queries == 2 * heads * size
        # Queries, their gate and what is projected back are as wide as all heads, keys and values as their groups.
        keys = layer.attention.matrices - (2 + gated) * hidden * heads * size
        groups, rest = divmod(keys, 2 * hidden * size)
        if rest or groups < 1:
            raise _NotModelledError(f"{self._what}: attention is not that of heads of {size}: it is not modelled")
        return {"query_groups": groups, "head_size": None if size * heads == hidden else size, "attention_gate": gated}

    def _state_space(self) -> dict[str, Any]:
        layer = self._with("M")
        if layer is None:
            return {}
        owner = layer.owner(".A_log")
        if len(layer.shapes[f"{owner}.A_log"]) > 1:
            raise _NotModelledError(f"{self._what}: {owner} has a state for each channel: it is not modelled")
        kind = "mamba" if f"{owner}.D" in layer.shapes else "delta"
        return {"state_space": {"kind": kind} | {name: self._value(*each) for name, each in STATE_SPACE.items()}}

    def _experts(self) -> dict[str, Any]:
        parts = tuple(layer.parts for layer in self.layers)
        if self._with("E") is None:
            return {"parts": parts} if set(parts) != {"*-"} else {}
        sparse = [i for i, each in enumerate(parts) if "E" in each]
        every = sparse[1] - sparse[0] if len(sparse) > 1 else 1
        dense = sparse[0] if every == 1 else 0
        ruled = tuple("*E" if i >= dense and (i + 1) % every == 0 else "*-" for i in range(len(parts)))
        width = self._value("moe_intermediate_size", "intermediate_size")
        shared = self._value(*SHARED)
        if shared is None:
            shared = (self._value("n_shared_experts", "moe_num_shared_experts") or 0) * width
        return {
            "experts": self._value(*EXPERTS),
            "experts_per_token": self.config.num_experts_per_tok,
            "expert_ffn": width,
            "shared_ffn": shared,
            "expert_latent": self._value("moe_latent_size") or 0,
            "expert_groups": self._value("n_group") or 1,
            "groups_per_token": self._value("topk_group") or 1,
            **({"dense_layers": dense, "expert_every": every} if parts == ruled else {"parts": parts}),
        }

    def _mlp(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The width of an MLP, and whether it has a gate: a third matrix."""
        hidden = self.config.hidden_size
        dense, sparse = self._with("-"), self._with("E")
        if dense is not None:
            mlp = dense.mlp
            own = self._value("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
            widths = (own, self._value("shared_intermediate_size"), mlp.widest)  # the second: Granite's without experts
            ffn = next((w for w in widths if w and mlp.matrices in (2 * hidden * w, 3 * hidden * w)), own or mlp.widest)
            return {"ffn": ffn, "gated": mlp.matrices == 3 * hidden * ffn}
        if sparse is None:
            raise _NotModelledError(f"{self._what}: no layer has an MLP: it is not modelled")
        one_matrix = (fields["expert_latent"] or hidden) * fields["experts"] * fields["expert_ffn"]
        ffn = self._value("intermediate_size") or fields["expert_ffn"]  # of no layer
        return {"ffn": ffn, "gated": sparse.experts.matrices == 3 * one_matrix}

    def _window(self) -> dict[str, Any]:
        """The sliding window, and the layers without it. Raises InputError if a layer has attention of another kind."""
        window, layers = self._value("sliding_window") or 0, len(self.layers)
        kinds = self._value("layer_types") or ["sliding_attention"] * layers
        attend = [kind for kind, layer in zip(kinds, self.layers, strict=True) if "*" in layer.parts]
        if other := [kind for kind in attend if kind not in ("sliding_attention", "full_attention")]:
            raise _NotModelledError(
                f"{self._what}: layer_types has {shown(other[0])}: it is not modelled, sliding and full are"
            )
        full = tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
        if not window or "sliding_attention" not in attend:
            return {}
        if self._value("use_bidirectional_attention"):  # transformers halves it: so much on each side
            window = 2 * (window - 1)
        return {"window": window, "full_layers": full}

    def _vectors(self, fields: dict[str, Any]) -> Vectors:
        latents = fields.get("kv_latent", 0) + fields.get("query_latent", 0)  # their norms belong to attention
        embedding = _Group(self._outside("embed")).vectors
        attending, dense, sparse = self._with("*"), self._with("-"), self._with("E")
        assert attending is not None
        norms = next((each for each in self.layers if "*" not in each.parts), attending)
        layer = 2 * (norms.attention.vectors - (latents if norms is attending else 0)) // len(norms.parts)
        attention = attending.attention.vectors - latents - layer * len(attending.parts) // 2
        if attention < 0:
            raise _NotModelledError(f"{self._what}: layers with attention have fewer norms: that is not modelled")
        return Vectors(
            layer=layer,
            attention=attention,
            mlp=dense.mlp.vectors if dense else 0,
            router=sparse.mlp.vectors if sparse else 0,
            expert=sparse.experts.vectors // fields["experts"] if sparse else 0,
            embedding=embedding,
            head=_Group(self._outside()).vectors - embedding,
        )

    def _modules(self) -> ModuleNames:
        """The names of its modules, in the order in which they run."""
        inside = next(name for name, each in self._model.named_modules() if each is self._list)
        names = [name.rpartition(".")[0] for name, _ in self._model.named_parameters(remove_duplicate=False)]
        begin = next(n for n, name in enumerate(names) if name.startswith(f"{inside}."))
        outside = [name for name in dict.fromkeys(names) if not name.startswith(f"{inside}.")]
        first = tuple(name for name in outside if name in names[:begin] and "final" not in name)
        bare = (name for name, each in self._model.named_modules() if not any(True for _ in each.parameters()))
        every = tuple(name for name in bare if "rotary" in name and not name.startswith(f"{inside}."))
        return ModuleNames(first=first, layer=inside, last=tuple(x for x in outside if x not in first), every=every)

    def _outside(self, *words: str) -> list[tuple[str, Any]]:
        """The parameters outside the layers with one of these words in their names, or all."""
        inside = {id(each) for layer in self.layers for each in layer.parameters.values()}
        return [
            (name, each)
            for name, each in self._model.named_parameters()
            if id(each) not in inside and (not words or any(word in name for word in words))
        ]


def _made(whole: dict[str, Any]) -> tuple[Any, Any, int]:
    """The config of the language model, the model on the meta device, and how many parameters it has.

    In a model of text and more it depends on the type which config says whether weights are tied, and what a head has:
    both are as in that model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, AutoModelForPreTraining
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

    logger = logging.getLogger("transformers")  # what it logs is about a model that is used
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"), torch.device("meta"):
            made = AutoConfig.for_model(**(whole if "model_type" in whole else whole.get("text_config", whole)))
            config = made.get_text_config(decoder=True)
            parts: tuple[Any, ...] = ()
            if config is not made and not config.is_encoder_decoder:
                listed = type(made) in MODEL_FOR_MULTIMODAL_LM_MAPPING
                auto = AutoModelForMultimodalLM if listed else AutoModelForPreTraining
                try:
                    outer = auto.from_config(made)
                except (AttributeError, TypeError, ValueError):  # whose other parts have the default shape, then
                    texts = {name: value for name, value in whole.items() if name not in _parts(whole)}
                    outer = auto.from_config(AutoConfig.for_model(**texts))
                parts = outer.get_decoder(), outer.get_output_embeddings()
                config.tie_word_embeddings = parts[1].weight is outer.get_input_embeddings().weight
            model = AutoModelForCausalLM.from_config(config)
            counts = {id(each): each.numel() for part in parts or (model,) for each in part.parameters()}
            return config, model, sum(counts.values())
    finally:
        logger.setLevel(level)


def _parts(whole: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The configs of what is in the model beside text."""
    parts = {name: value for name, value in whole.items() if name.endswith("_config") and isinstance(value, dict)}
    return {name: parts[name] for name in sorted(parts.keys() - NO_PARTS)}


def _left_out(whole: dict[str, Any]) -> Iterator[str]:
    """The parts of the model that a `Transformer` does not have."""
    text, parts = whole.get("text_config"), _parts(whole)
    for name, part in parts.items():
        yield f"{_shown(name)} ({_shown(part.get('model_type') or name.removesuffix('_config'))})"
    if isinstance(text, dict) and whole.get("model_type") and not parts:
        yield f"what {_shown(whole['model_type'])} adds to its language model"
    architectures = whole.get("architectures")
    for name in architectures if isinstance(architectures, list) else ():
        if not str(name).endswith(HEADED):
            yield f"the head of {_shown(name)}: that of a causal language model is taken"


def _shown(value: object) -> str:
    """The text of a value for a sentence: short, and without characters that a terminal obeys."""
    return repr(str(value)[:100])[1:-1][:200]
