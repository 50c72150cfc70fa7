"""`stages_of`: a model as its author wrote it trains as in a plain run, however it was cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.ranks import cases, models
from support.ranks.models import MICROBATCHES, WIDTH
from support.ranks.worker import Ranks
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask

from optpipe.errors import InputError
from optpipe_runtime import stages_of
from optpipe_runtime.execute.batch import Batch, ChunkSpecs


@pytest.mark.parametrize(("kind", "placement"), [("causal LM", [0, 1, 1]), ("layers", [0, 1]), ("skips", [0, 1, 0])])
def test_losses_outputs_and_gradients_are_those_of_the_whole_model(
    ranks: Ranks, kind: str, placement: list[int]
) -> None:
    losses, outputs, whole = models.plain(kind)
    by_rank = ranks(models.trained, kind=kind, placement=placement)
    reports, _ = by_rank[placement[-1]]
    assert len(reports) == 7
    for report in reports:
        assert report.losses == losses
        assert report.outputs is not None
        for found, expected in zip(report.outputs, outputs, strict=True):
            assert torch.equal(found, expected)
    if placement[-1] != 0:
        assert by_rank[0][0][0].outputs is None
    prefix = {"causal LM": "model.", "layers": "", "skips": "module."}[kind]
    gradients: dict[str, Any] = {}
    for _, found in by_rank:
        gradients |= {name.split(".", 1)[1].removeprefix(prefix): gradient for name, gradient in found.items()}
    if kind == "causal LM":  # the tied embedding under its other name
        np.testing.assert_array_equal(gradients.pop("lm_head.weight"), gradients["model.embed_tokens.weight"])
    expected = dict(whole.named_parameters())
    assert gradients.keys() == expected.keys()
    for name, parameter in expected.items():
        assert parameter.grad is not None
        # The sum over the copies of a tied parameter has another order.
        np.testing.assert_allclose(gradients[name], parameter.grad, rtol=1e-5, atol=1e-7, err_msg=name)


def test_a_parameter_of_two_ranks_is_tied() -> None:
    """The embedding that is the head, too: by one key on both ranks; not if both stages are on one rank."""
    for placement, count in (([0, 1], 1), ([0, 0], 0)):
        stages = stages_of(models.CausalLM(), placement, rank=0)
        assert [len(stage.shared) for stage in stages.values()] == [count] * len(stages)  # type: ignore[arg-type]
    first, last = (stages_of(models.CausalLM(), [0, 1], rank=rank)[rank] for rank in range(2))
    assert list(first.shared) == list(last.shared)  # type: ignore[arg-type, call-overload]


@pytest.mark.parametrize("layers", [None, [1, 1, 3], [2, 2, 1], [3, 1, 1]])
def test_layers_say_where_a_model_is_cut(layers: list[int] | None) -> None:
    whole = models.CausalLM(tied=False)
    stages = stages_of(whole, [0, 0, 0], layers, rank=0)
    counts = [
        sum(isinstance(part, nn.Embedding | models.Layer | nn.LayerNorm) for part in stage.modules())
        for stage in stages.values()
    ]
    assert counts == (layers or [2, 1, 2])
    assert {p for stage in stages.values() for p in stage.parameters()} == set(whole.parameters())
    assert len(whole.model.layers) == 3, "the model stays whole"
    assert isinstance(whole.model.norm, nn.LayerNorm)


def test_names_do_not_depend_on_the_placement() -> None:
    whole = models.model("layers")
    for placement in ([0, 0], [0, 0, 0, 0]):
        stages = stages_of(whole, placement, rank=0)
        assert [name for stage in stages.values() for name in stage.state_dict()] == list(whole.state_dict())


def test_stages_of_torch_are_taken_as_they_are(ranks: Ranks) -> None:
    (_, _), (losses, told) = ranks(models.of_torch, placement=[0, 1])
    inputs, targets = cases.batch(0, MICROBATCHES)
    assert losses == cases.plain_step(cases.make_stages(2), inputs, targets, MICROBATCHES)
    assert "mask" in told[0]


@pytest.mark.parametrize(
    ("model", "arguments", "sentence"),
    [
        (models.CausalLM(rescaled=True), ([0],), "model is a CausalLM: its forward changes hidden states outside of"),
        (models.CausalLM(output_router_logits=True), ([0],), "model is a CausalLM with output_router_logits: its loss"),
        (
            nn.Linear(2, 2),
            ([0],),
            "model is a Linear: a causal language model of transformers needs a decoder",
        ),
        (3, ([0],), "model is a int: must be a list of layers, an nn.Sequential, a causal language model"),
        ([nn.Tanh()], ([0, 0],), "placement has 2 stages: the model has 1 layers"),
        ([nn.Tanh(), nn.Tanh()], ([0, 0], [2]), "layers has 1 entries: placement has 2 stages, one entry each"),
        ([nn.Tanh(), nn.Tanh()], ([0, 0], [2, 1]), r"layers = \[2, 1\]: must be at least 1 each, and 2 together"),
    ],
)
def test_what_cannot_be_cut(model: Any, arguments: tuple[Any, ...], sentence: str) -> None:
    with pytest.raises(InputError, match=rf"^{sentence}"):
        stages_of(model, *arguments, rank=0)


def test_an_argument_that_no_layer_takes_is_named() -> None:
    (stage,) = stages_of([models.Layer()], [0], rank=0).values()
    with pytest.raises(InputError, match=r"^kwargs has 'masks': no layer of the model takes it$"):
        stage(torch.zeros(2, WIDTH), masks=None)


# Cutting


def test_values_are_cut_as_their_specs_say() -> None:
    from torch.distributed.pipelining.microbatch import TensorChunkSpec

    x, turned = torch.arange(12).reshape(6, 2), torch.arange(12).reshape(2, 6)
    specs = ChunkSpecs((TensorChunkSpec(0), TensorChunkSpec(1), None), {"t": None})  # type: ignore[no-untyped-call]
    batch = Batch((x, {"a": turned, "b": 3}, x), None, {"t": x, "u": [x, None]}, specs)
    cut = batch.cut_inputs(3)
    assert [part[0].tolist() for part in cut] == [x[a : a + 2].tolist() for a in (0, 2, 4)]
    assert [part[1]["a"].tolist() for part in cut] == [turned[:, a : a + 2].tolist() for a in (0, 2, 4)]
    assert all(part[1]["b"] == 3 and part[2] is x for part in cut)
    named = batch.cut_kwargs(0, 3)
    assert all(part["t"] is x and part["u"][1] is None for part in named)
    assert torch.cat([part["u"][0] for part in named]).equal(x)
    by_stage = Batch(x, None, {0: {"t": x}})
    assert by_stage.cut_kwargs(1, 2) == [{}, {}]
    assert by_stage.cut_kwargs(0, 2)[1]["t"].equal(x[3:])


def test_a_block_mask_is_cut_by_sequences() -> None:
    mask = create_block_mask(lambda b, h, q, kv: q >= kv + b, 4, None, 256, 256, device="cpu", BLOCK_SIZE=128)
    chunks = Batch(torch.zeros(4), None, {"mask": mask}).cut_kwargs(0, 2)
    dense = torch.cat([chunk["mask"].to_dense() for chunk in chunks])
    assert dense.equal(mask.to_dense())


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        (
            Batch(torch.zeros(4), None, {"mask": torch.zeros(5, 4)}),
            r"kwargs\['mask'\] has shape \[5, 4\]: its first d",
        ),
        (
            Batch(torch.zeros(4), None, {"mask": torch.zeros(())}),
            r"kwargs\['mask'\] has shape \[\]: its first dimension",
        ),
        (Batch((torch.zeros(4), 3), None, {}, ChunkSpecs((None,))), "args_chunk_spec has 1 entries: inputs has 2, one"),
    ],
)
def test_what_cannot_be_cut_into_microbatches(batch: Batch, sentence: str) -> None:
    with pytest.raises(InputError, match=rf"^{sentence}"):
        _ = batch.cut_inputs(2), batch.cut_kwargs(0, 2)
