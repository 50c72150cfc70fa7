"""`stages_of`: a model as its author wrote it trains as in a plain run, however it was cut."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.ranks import cases, models
from support.ranks.models import MICROBATCHES, WIDTH
from support.ranks.worker import Ranks
from torch import Tensor, nn
from torch.nn import functional
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


def test_stages_of_torch_are_taken_as_they_are(ranks: Ranks) -> None:
    (_, _), (losses, told) = ranks(models.of_torch, placement=[0, 1])
    inputs, targets = cases.batch(0, MICROBATCHES)
    assert losses == cases.plain_step(cases.make_stages(2), inputs, targets, MICROBATCHES)
    assert "mask" in told[0]


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "arguments", "sentence"),
    [
        (models.CausalLM(output_router_logits=True), ([0],), "model is a CausalLM with output_router_logits: its loss"),
        (nn.Linear(2, 2), ([0],), "model is a Linear: a causal language model of transformers needs a decoder"),
        (Residual(nn.Tanh()), ([0],), "model is a Residual: its own forward or hooks are lost"),
        (3, ([0],), "model is a int: must be a list of layers, an nn.Sequential, a causal language model"),
        ([nn.Tanh()], ([0, 0],), "placement has 2 stages: the model has 1 layers"),
        ([nn.Tanh(), nn.Tanh()], ([0, 0], [2]), "layers has 1 entries: placement has 2 stages, one entry each"),
        ([nn.Tanh(), nn.Tanh()], ([0, 0], [2, 1]), r"layers = \[2, 1\]: must be at least 1 each, and 2 together"),
    ],
)
def test_what_cannot_be_cut(model: Any, arguments: tuple[Any, ...], sentence: str) -> None:
    with pytest.raises(InputError, match=rf"^{sentence}"):
        stages_of(model, *arguments, rank=0)


class Odd(models.Decoder):
    """Does something around its layers that no stage can do alone."""

    def __init__(self, kind: str) -> None:
        super().__init__(3)
        self.kind = kind

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None,
        use_cache: bool = True,
    ) -> Any:
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        kind, first, layers = self.kind, hidden, list(self.layers)
        if kind == "detached":
            hidden = hidden.detach()
        if kind == "masked" and attention_mask is not None:
            hidden = hidden * 0.5
        if kind == "dropout":
            hidden = functional.dropout(hidden, 0.5, self.training)
        if kind == "another order":
            layers = layers[::-1]
        for layer in layers:
            if kind == "value embeddings":
                hidden = layer(hidden, places=self.embed_tokens(input_ids)[..., 0])
            elif kind == "of the tokens":
                hidden = layer(hidden, None if input_ids is None else (input_ids != 3).float())
            else:
                hidden = layer(hidden)
            if kind == "x0":
                hidden = hidden + 0.1 * first
        hidden = self.norm(hidden)
        return SimpleNamespace(last_hidden_state=hidden)


class Keeps(models.Layer):
    """Layers that share an object, in which the first one leaves something for the others."""

    def __init__(self, store: dict[str, Tensor], is_first: bool) -> None:
        super().__init__()
        self.store, self.is_first = store, is_first

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if self.is_first:
            self.store["first"] = x
        return super().forward(x) + self.store["first"].mean()


def odd(kind: str) -> Any:
    whole = models.CausalLM()
    whole.model = Odd(kind)
    if kind == "an object of all layers":
        store: dict[str, Tensor] = {}
        whole.model.layers = nn.ModuleList(Keeps(store, i == 0) for i in range(3))
    return whole


ODD = dict.fromkeys(["masked", "dropout", "another order", "of the tokens", "x0"], "has other logits")
ODD |= dict.fromkeys(["value embeddings", "an object of all layers"], "fails with")
ODD["detached"] = "has another gradient of "


@pytest.mark.parametrize("kind", ODD)
def test_a_model_that_is_no_row_of_layers_is_refused(kind: str) -> None:
    with pytest.raises(InputError, match=rf"^model is a CausalLM: as a row of stages it {ODD[kind]}"):
        stages_of(odd(kind), [0, 0], [3, 2], rank=0)
    with pytest.raises(InputError, match=r"^model is a CausalLM: "):
        stages_of(odd(kind), [0] * 5, rank=0)
    stages_of(odd(kind), [0], rank=0)  # the whole is one stage


class Pooled(models.CausalLM):
    """A reward model: the score of the last token that is no padding."""

    def forward(self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **given: Any) -> Any:
        hidden = self.model(input_ids=input_ids, inputs_embeds=inputs_embeds, **given).last_hidden_state
        scores = self.lm_head(hidden)
        last = torch.full((len(scores),), -1)
        if input_ids is not None:
            last = (torch.arange(scores.shape[1]) * (input_ids != 0)).argmax(1)
        return SimpleNamespace(logits=scores[torch.arange(len(scores)), last])


def test_a_head_that_looks_for_padding_is_refused() -> None:
    whole = Pooled(tied=False, pad_token_id=0)
    with pytest.raises(InputError, match=r"^model is a Pooled: as a row of stages it has other logits"):
        stages_of(whole, [0, 0], rank=0)
    stages_of(whole, [0], rank=0)  # the whole in one stage


@pytest.mark.parametrize("place", ["of the decoder", "in a child", "tied"])
def test_parameters_outside_of_the_layers_are_refused(place: str) -> None:
    whole = models.CausalLM()
    if place == "of the decoder":
        whole.model.scale = nn.Parameter(torch.zeros(1))
    else:
        whole.model.scale = nn.Linear(WIDTH, models.WORDS, bias=False)
        whole.model.scale.weight = whole.lm_head.weight if place == "tied" else whole.model.scale.weight
    with pytest.raises(
        InputError, match=r"^model is a CausalLM: its scale (is a|has) parameters? outside of its layers"
    ):
        stages_of(whole, [0, 0], rank=0)


def test_the_model_stays_as_it_was() -> None:
    """Numbers, gradients, modes and random numbers; also one without memory, in bfloat16, frozen, or without grad."""
    whole = models.CausalLM(tied=False).eval()
    for parameter in whole.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: (value.clone(), value.grad) for name, value in whole.named_parameters()}
    random = torch.get_rng_state()
    with torch.no_grad():
        stages_of(whole, [0, 0], rank=0)
    assert torch.equal(torch.get_rng_state(), random)
    assert not whole.training
    for name, value in whole.named_parameters():
        assert torch.equal(value, before[name][0])
        assert value.grad is before[name][1]
    with torch.device("meta"):
        stages_of(models.CausalLM().requires_grad_(False), [0, 0], rank=0)
    stages_of(models.CausalLM().bfloat16(), [0, 0], rank=0)


def test_what_was_compiled_is_not_compiled_to_be_compared() -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError

    whole = models.CausalLM()
    whole.model.layers[0].compile(backend=refuse)
    whole.model.layers[1] = torch.compile(whole.model.layers[1], backend=refuse)
    stages_of(whole, [0, 0], rank=0)
    with pytest.raises(InputError, match=r"^model is compiled as a whole, and cannot be cut: give the model itself"):
        stages_of(torch.compile(whole, backend=refuse), [0, 0], rank=0)


@pytest.mark.parametrize("fault", ["large", "no logits", "no copy"])
def test_a_model_that_cannot_be_compared_is_refused_in_a_sentence(fault: str) -> None:
    whole = models.CausalLM(tied=False)
    if fault == "large":
        whole.lm_head = nn.Linear(WIDTH, 2**21 + 1, device="meta")
    elif fault == "no logits":
        whole.model.register_forward_hook(lambda *_: SimpleNamespace(last_hidden_state=None))
    else:
        whole.lock = threading.Lock()
    sentence = {
        "large": "it has 19 million parameters, and its config makes no small model like it",
        "no logits": "a small run of it fails with TypeError: linear",
        "no copy": "a small run of it fails with TypeError: cannot pickle",
    }[fault]
    with pytest.raises(InputError, match=rf"^model is a CausalLM: it cannot be compared with a .* stages: {sentence}"):
        stages_of(whole, [0, 0], rank=0)


def test_a_layer_in_several_places_is_called_in_each() -> None:
    tanh = nn.Tanh()
    whole = nn.Sequential(nn.Linear(WIDTH, WIDTH), tanh, nn.Linear(WIDTH, WIDTH), tanh)
    first, second = stages_of(whole, [0, 0], rank=0).values()
    x = torch.randn(2, WIDTH)
    assert torch.equal(second(first(x)), whole(x))


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
    cut, _, named_of = batch.cut(3, True, False, (0, 1))
    assert [part[0].tolist() for part in cut] == [x[a : a + 2].tolist() for a in (0, 2, 4)]
    assert [part[1]["a"].tolist() for part in cut] == [turned[:, a : a + 2].tolist() for a in (0, 2, 4)]
    assert all(part[1]["b"] == 3 and part[2] is x for part in cut)
    named = named_of[0]
    assert all(part["t"] is x and part["u"][1] is None for part in named)
    assert torch.cat([part["u"][0] for part in named]).equal(x)
    by_stage = Batch(x, None, {0: {"t": x}}).cut(2, True, False, (0, 1)).kwargs
    assert by_stage[1] == [{}, {}]
    assert by_stage[0][1]["t"].equal(x[3:])


def test_a_block_mask_is_cut_by_sequences() -> None:
    mask = create_block_mask(lambda b, h, q, kv: q >= kv + b, 4, None, 256, 256, device="cpu", BLOCK_SIZE=128)
    chunks = Batch(torch.zeros(4), None, {"mask": mask}).cut(2, True, False, (0, 1)).kwargs[0]
    dense = torch.cat([chunk["mask"].to_dense() for chunk in chunks])
    assert dense.equal(mask.to_dense())


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        (Batch(torch.zeros(4), None, {"mask": torch.zeros(5, 4)}), r"kwargs\['mask'\] has shape \[5, 4\]: its first d"),
        (
            Batch(torch.zeros(4), None, {"mask": torch.zeros(())}),
            r"kwargs\['mask'\] has shape \[\]: its first dimension",
        ),
        (Batch((torch.zeros(4), 3), None, {}, ChunkSpecs((None,))), "args_chunk_spec has 1 entries: inputs has 2, one"),
    ],
)
def test_what_cannot_be_cut_into_microbatches(batch: Batch, sentence: str) -> None:
    with pytest.raises(InputError, match=rf"^{sentence}"):
        batch.cut(2, True, False, (0, 1))
