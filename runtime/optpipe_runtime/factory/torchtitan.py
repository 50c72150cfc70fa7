"""A flavour of one of torchtitan's models, such as `torchtitan:llama3/8B`, by the registry of torchtitan 0.3.0: one
stage a rank, cut as its trainer does for 1F1B, with random weights.

A stage is the model alone: without FSDP, tensor parallelism, activation checkpoints and torch.compile, for which a
trainer's config asks. Parameters have the type in which the trainer computes with them (`mixed_precision_param`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from optpipe.errors import InputError, did_you_mean
from optpipe_runtime.factory.setup import Factory, Setup, Sizes, here, language_model, needed

PREFIX = "torchtitan:"


def of_flavour(name: str, sizes: Sizes) -> Factory:
    """The model of a flavour. Sequences are as long as torchtitan's default, unless `sizes` has a length.

    On a CPU, where FlexAttention has no backward, attention is `ScaledDotProductAttention`.

    Raises
    ------
    InputError
        If torchtitan is not installed or has no such model, or does not cut it. The factory raises it if torchtitan
        refuses this number of ranks or this length.
    """
    what = f"model = {name!r}"
    spec = _spec(what, *name.removeprefix(PREFIX).partition("/")[::2])
    titan = _module(
        "distributed.pipeline_parallel", what, "pipeline_llm", "_generate_llm_fqn_per_model_part", "_split_module"
    )
    config = _module("config", what, "TrainingConfig", "ParallelismConfig", "TORCH_DTYPE_MAP")
    trainer = _module("trainer", what, "Trainer")
    cross_entropy = _module("components.loss", what, "cross_entropy_loss").cross_entropy_loss  # summed over all tokens
    if spec.pipelining_fn is not titan.pipeline_llm:
        raise InputError(f"{what}: torchtitan cuts it in a way of its own, only models of pipeline_llm can be measured")

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        mean: Tensor = cross_entropy(logits, labels) / labels.numel()
        return mean

    def factory(rank: int, ranks: int) -> Setup:
        training = config.TrainingConfig(disable_cuda_graphs=True)
        if sizes.sequence is not None:
            training.seq_len = sizes.sequence
        parallelism = config.ParallelismConfig(pipeline_parallel_degree=ranks)
        try:
            spec.model.update_from_config(
                config=trainer.Trainer.Config(model_spec=spec, training=training, parallelism=parallelism)
            )
            names = titan._generate_llm_fqn_per_model_part(
                ranks,
                len(spec.model.layers),
                parallelism.pipeline_parallel_first_stage_less_layers,
                parallelism.pipeline_parallel_last_stage_less_layers,
            )
        except (ValueError, NotImplementedError) as error:
            raise InputError(f"{what} on {ranks} ranks: torchtitan: {error}") from None
        device = here()
        if device.type == "cpu":
            _attend_on_cpu(spec.model.layers, what)
        with torch.device("meta"):
            stage = titan._split_module(spec.model.build(), names[rank])
        stage.to_empty(device=device)
        with torch.no_grad():
            stage.init_weights(buffer_device=device)
        for parameter in stage.parameters():
            parameter.data = parameter.to(config.TORCH_DTYPE_MAP[training.mixed_precision_param])
        each, called = sizes.microbatch_size or 1, f"{spec.name} {spec.flavor}"
        positions = torch.arange(training.seq_len, device=device).expand(sizes.microbatches * each, -1)
        named = {"positions": positions}
        if device.type != "cpu":  # those of one micro-batch: all are alike, and VarlenAttention's cannot be cut
            named["attention_masks"] = stage.get_attention_masks(positions[:each])
        of = sizes._replace(sequence=training.seq_len)
        setup = language_model(stage, rank, ranks, loss, spec.model.vocab_size, of, called, **named)
        return replace(setup, options={"kwargs_chunk_spec": {"attention_masks": None}})

    return factory


def _module(name: str, what: str, *has: str) -> Any:
    """A module of torchtitan. Raises `InputError` if it lacks a name: other releases have other ones."""
    module = needed(f"torchtitan.{name}", what)
    if missing := [each for each in has if not hasattr(module, each)]:
        raise InputError(f"{what}: torchtitan.{name} has no {missing[0]}: torchtitan 0.3.0 is expected")
    return module


def _spec(what: str, model: str, flavour: str) -> Any:
    """The `ModelSpec` of torchtitan's registry."""
    models = sorted(_module("models", what, "_supported_models")._supported_models)
    if model not in models:
        near = did_you_mean(model, models, "; ")
        raise InputError(f"{what}: torchtitan has no model {model!r}, but {', '.join(models)}{near}")
    module = _module(f"models.{model}", what, "model_registry")
    flavours = next(
        value for name, value in vars(module).items() if name.endswith("_configs") and isinstance(value, dict)
    )
    if flavour not in flavours:
        near = did_you_mean(flavour, flavours, "; ")
        raise InputError(f"{what}: {model} has no flavour {flavour!r}, but {', '.join(flavours)}{near}")
    return module.model_registry(flavour)


def _attend_on_cpu(layers: Any, what: str) -> None:
    attention = _module("models.common.attention", what, "ScaledDotProductAttention")
    for layer in layers:
        if layer.attention is not None:
            layer.attention.inner_attention = attention.ScaledDotProductAttention.Config()
