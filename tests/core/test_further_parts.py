"""The cost model beyond a usual transformer: multi-token prediction, heads in parts, adapters, hybrids, experts' biases
and latents."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.transformers import GPT, made

from optpipe import InputError
from optpipe.transformer.estimate import estimate, even_layers
from optpipe.transformer.presets import GPUS, MODELS
from optpipe.transformer.records import Parallelism, Run, Transformer

MIXER = {"kind": "mamba", "heads": 8, "head_size": 16, "groups": 1, "state": 16}


def test_a_module_that_predicts_a_further_token_is_a_layer_a_projection_and_the_head_again():
    """DeepSeek-V3 (2024): the model has 671 billion parameters, its module 14 more, of which 2.7 are shared."""
    model = MODELS["deepseek-v3"]
    plain, further = (made(model, {"pp": 16, "ep": 8, "dp": 8}, mtp=mtp) for mtp in (0, 1))
    layer, module, head = further.pieces[-3], further.pieces[-2], plain.pieces[-1]
    assert further.parameters - plain.parameters == pytest.approx(11.5e9, rel=0.01)
    projection = 2 * further.sequence * 2 * model.hidden * model.hidden
    assert module.work.matmul == pytest.approx(layer.work.matmul + projection)
    assert further.pieces[-1].work.matmul == pytest.approx(2 * head.work.matmul)
    assert module.activation_bytes("full") == module.activation_bytes("none") > layer.activation_bytes("none")
    assert even_layers(61, 32, mtp=1) == (1, *[2] * 30, 0)  # Et|(tt|)*30mL
    assert further.cuts == (5, *[4] * 14, 3)  # Megatron-Bridge's Et*4|(t*4|)*14tmL, embedding, module and head counted
    assert plain.cuts[-1] == 4


@pytest.mark.parametrize(("sequence_parallel", "sent"), [(True, 2 + 1 + 1 + 2), (False, 1 + 2 * 2)])
def test_the_projection_of_a_module_is_divided_over_its_columns(sequence_parallel, sent):
    """Megatron-core 0.16.1: a gather of 2h and one of h, back one of h and a scatter of 2h; without sequence
    parallelism a gather of h, and back an all-reduce of 2h. Of F and B together."""
    t, model = 4, MODELS["llama-3-8b"]
    division = {"tp": t, "sequence_parallel": sequence_parallel}
    alone, e = made(model, {}, mtp=1), made(model, division, mtp=1)
    layer, module = e.pieces[-3], e.pieces[-2]
    projection = module.work.matmuls[0]
    assert projection.operations * t == alone.pieces[-2].work.matmuls[0].operations
    vectors = 3 * model.hidden
    held = [each.pieces[-2].weights - each.pieces[-3].weights - vectors for each in (alone, e)]
    assert held[0] == held[1] * t
    more = sum(each.bytes for each in module.work.sent) - sum(each.bytes for each in layer.work.sent)
    assert 2 * more == sent * (t - 1) / t * 2 * e.sequence * model.hidden
    assert alone.pieces[-2].work.sent == ()


def test_modules_that_predict_have_a_stage_of_their_own_and_stages_may_be_empty():
    """`Et*3|(tt|)*29m|L`, then with an empty stage: the same pieces on other devices."""
    model, split = MODELS["deepseek-v3"], {"pp": 16, "chunks": 2, "ep": 8, "dp": 8}
    own = made(model, split | {"layers": [3, *[2] * 29, 0, 0], "mtp_stage": 30}, gpu="B300", mtp=1)
    assert own.cuts == (4, *[2] * 29, 1, 1)
    both = made(model, split | {"layers": [3, *[2] * 28, 0, 2, 0]}, gpu="B300", mtp=1)
    assert both.cuts == (4, *[2] * 28, 0, 2, 2)
    empty = both.problem.stages[29]
    assert (empty.forward_ms, empty.activation_bytes, empty.device) == (0, 0, 13)
    assert own.problem.stages[30].forward_ms + own.problem.stages[31].forward_ms == both.problem.stages[31].forward_ms
    for layers, stage in ([3, *[2] * 28, 0, 1, 1], 30), ([3, *[2] * 29, 0, 0], 32):
        with pytest.raises(InputError, match=f"mtp_stage = {stage}: expected a stage behind which no stage has layers"):
            made(model, split | {"layers": layers, "mtp_stage": stage}, mtp=1)
    with pytest.raises(InputError, match="device 1 has none"):
        made(model, {"pp": 3, "layers": [30, 0, 31]})


@pytest.mark.parametrize(("tied", "pp", "shape"), list(product((False, True), (1, 2), ("looped", "v"))))
def test_modules_that_predict_have_the_embedding_where_their_device_has_it_not(tied, pp, shape):
    """Also where a plan takes the pieces of another division."""
    model = MODELS["llama-3-8b"].model_copy(update={"tied": tied})
    division = Parallelism(pp=pp, shape=shape, chunks=2 if shape == "v" else 1)
    here = estimate(model, division, GPUS["B300"], Run(microbatches=8, mtp=1))
    held = sum(device.weights for device in here.devices) / 2 - here.parameters
    assert held == (model.embedding_matrix if pp == 2 and shape == "looped" else 0)
    other = estimate(model, Parallelism(pp=4), GPUS["B300"], here.run).divided(division, here.run)
    assert other.devices == here.devices


@pytest.mark.parametrize(("name", "layer", "chunk"), [("nemotron-3-nano", 1, 128), ("qwen3-next-80b-a3b", 1, 64)])
def test_a_state_space_scans_a_sequence_in_chunks(name, layer, chunk):
    """Mamba-2's (Dao and Gu 2024, section 6) and the delta rule's operations, by hand; its time grows with the
    tokens, and a hybrid's kinds of layer differ."""
    model = MODELS[name]
    mixer, tokens = model.state_space, 8192
    one, two = (made(model, gpu="B200", sequence=each) for each in (tokens, 2 * tokens))
    piece, scan = one.pieces[layer], mixer.head_size * mixer.state * mixer.heads
    within = mixer.heads * mixer.head_size + mixer.groups * mixer.state
    if mixer.kind == "delta":
        within, scan = mixer.heads * (3 * mixer.state + 2 * mixer.head_size), 1.5 * scan
    assert piece.work.scans == pytest.approx(tokens * (chunk * within + 4 * scan))
    assert two.pieces[layer].work.scans == 2 * piece.work.scans
    assert two.pieces[layer].activation_bytes("none") == pytest.approx(2 * piece.activation_bytes("none"))
    inner = mixer.heads * mixer.head_size
    assert piece.work.matmuls[1][:3] == (tokens, model.hidden, inner)
    assert piece.activation_bytes("full") == 2 * tokens * model.hidden
    divided = made(model, {"tp": 2}, sequence=tokens).pieces[layer]
    assert divided.work.scans == pytest.approx(piece.work.scans / 2)
    with pytest.raises(InputError, match="cp = 2: expected 1, as a state that passes from token to token"):
        made(model, {"cp": 2}, sequence=tokens)
    for heads, groups in ((8, 1), (24, 6), (24, 12)):  # of 16 GPUs each would have half a head, or 1 1/2
        other = model.model_copy(update={"state_space": mixer.model_copy(update={"heads": heads, "groups": groups})})
        with pytest.raises(InputError, match=f"tp = 16: must divide the {heads} heads of the state space"):
            made(other, {"tp": 16})
    six = model.model_copy(update={"state_space": mixer.model_copy(update={"heads": 48, "groups": 6})})
    with pytest.raises(InputError, match=r"tp = 4: must divide .* and divide its 6 groups or be a multiple of them"):
        made(six, {"tp": 4})
    assert made(six, {"tp": 2}).pieces[layer].work.scans < made(six).pieces[layer].work.scans


def test_experts_of_a_latent_width_are_sent_and_computed_in_it():
    """Nemotron 3 Super has 120.7 billion parameters, 112.7 of them in experts of width 1024."""
    model = MODELS["nemotron-3-super"]
    expert = made(model, {"ep": 8, "dp": 8}).pieces[2]
    assert made(model).parameters == pytest.approx(120.67e9, rel=1e-3)
    assert expert.expert_weights == 512 / 8 * 2 * 1024 * 2688
    tokens = 8192
    outputs = 2 * tokens * (model.experts_per_token * (2688 + 1024) + 5376 + 1024 + 4096)
    assert expert.gradients == outputs  # of experts, the shared one, and the ways to and from the latent width
    wide = made(model.model_copy(update={"expert_latent": 0}), {"ep": 8, "dp": 8}).pieces[2]
    assert wide.expert_weights == 4 * expert.expert_weights
    (sent,) = expert.work.sent
    assert wide.work.sent[0].bytes == 4 * sent.bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parts": "*-*-"}, "parts has 4 entries: the model has 2 layers"),
        ({"parts": "M-"}, "parts has M: needs state_space"),
        ({"parts": "*E *-"}, "parts has E: needs experts"),
        ({"parts": ["*M", "*-"]}, "parts"),
        ({"state_space": MIXER}, "parts has no M: then state_space is left out"),
        ({"parts": "M-", "state_space": MIXER | {"groups": 3}}, "groups = 3: must divide heads = 8"),
        ({"expert_latent": 64}, "experts = 0: then .* expert_latent are 0, too"),
        ({"kv_latent": 64, "head_size": 64, "value_size": 64, "attention_gate": True}, "expected false with kv_latent"),
    ],
)
def test_wrong_parts_of_layers_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        Transformer.from_dict(GPT.model_dump() | {"layers": 2} | change, "shape")


@given(parts=st.integers(2, 16), tp=st.sampled_from([1, 4]))
def test_parts_of_the_head_are_the_head_and_each_saves_its_input(parts, tp):
    model = MODELS["llama-3-8b"]
    whole, cut = (made(model, {"tp": tp, "pp": 4, "head_parts": n}) for n in (1, parts))
    head, heads = whole.pieces[-1], cut.pieces[-parts:]
    assert len(cut.problem.layers) == model.layers + 1 + parts
    assert sum(each.weights for each in heads) == pytest.approx(head.weights)
    assert sum(each.work.matmul for each in heads) == pytest.approx(head.work.matmul)
    inputs = (parts - 1) * heads[1].saved[0].bytes
    assert sum(each.activation_bytes("none") for each in heads) == pytest.approx(head.activation_bytes("none") + inputs)
    assert cut.cuts[-1] == whole.cuts[-1] + parts - 1
    for refused, why in (
        (GPT.model_copy(update={"tied": True}), "tied to the embedding"),
        (GPT, "there mtp = 1 times"),
    ):
        with pytest.raises(InputError, match=rf"head_parts = {parts}: expected 1, as the head's matrix is {why}"):
            made(refused, {"head_parts": parts}, mtp=0 if refused.tied else 1)


@given(rank=st.integers(1, 512), tp=st.sampled_from([1, 2, 8]))
def test_adapters_alone_have_gradients_and_an_optimizer(rank, tp):
    """Beside each matrix of d x k numbers are rank · (d + k); W is that of the adapters, B stays (Hu et al. 2021)."""
    model = MODELS["llama-3-8b"]
    whole, adapted = (made(model, {"tp": tp}, lora=lora) for lora in (0, rank))
    widths = (4096 + 6144 / tp, 4096 / tp + 4096, 4096 + 2 * 14336 / tp, 14336 / tp + 4096)
    trained = 32 * rank * sum(widths)
    assert adapted.devices[0].gradients == pytest.approx(4 * trained, abs=4)
    assert adapted.devices[0].optimizer == pytest.approx(12 * trained, abs=12)
    assert adapted.devices[0].weights == pytest.approx(whole.devices[0].weights + 2 * trained, abs=4)
    kernels = [each.clock.backward_weight(each.pieces[1])._replace(host=0.0).ms for each in (adapted, whole)]
    assert kernels[0] < kernels[1]  # to launch more of them may take longer
    assert adapted.layers[1].backward_input_ms > whole.layers[1].backward_input_ms
    assert (adapted.layers[-1].backward_weight_ms, adapted.layers[-1].saved_for_weight_bytes) == (0, 0)
    one, other = (sum(each.work.matmul for each in e.pieces) for e in (whole, adapted))
    assert adapted.model_flops == pytest.approx(whole.model_flops + tp * (3 * (other - one) - one))
    plain, reduced, fused = (
        made(model, {"tp": tp, "dp": 2, "zero": zero}, lora=rank, fused_gradients=each).devices[0].workspace
        for zero, each in ((1, False), (2, False), (1, True))
    )
    assert reduced - plain == pytest.approx(4 * rank * sum(widths), abs=2)
    assert fused - plain == pytest.approx(2 * rank * sum(widths), abs=2)
    with pytest.raises(InputError, match="lora = 8: adapters of models with experts are not modelled"):
        made(MODELS["mixtral-8x7b"], lora=8)


def test_experts_biases_are_passes_and_one_kernel_leaves_out_those_of_activations():
    """Four passes over what both matrices put out, each token's own matrices aside: of gpt-oss 4 · 3 · 2880 numbers."""
    model = MODELS["gpt-oss-120b"]
    unbiased = model.model_copy(update={"vectors": None})
    traffic = [made(each).pieces[1].work.traffic for each in (model, unbiased)]
    sent = 4 * model.experts_per_token * 4096  # bytes of a number of each token: two, and of each expert
    assert traffic[0] - traffic[1] == 4 * sent / 2 * 3 * 2880
    halves = [made(each, {"tp": 2}).pieces[1].work.traffic for each in (model, unbiased)]
    assert halves[0] - halves[1] == 4 * sent / 2 * 2 * 2880  # one half of the way up, all of the way down
    assert made(model).parameters == pytest.approx(116.83e9, rel=1e-3)
    runs = [made(unbiased, gpu="B200", precision="mxfp8", fused_experts=fused).clock for fused in (False, True)]
    plain, fused = (made(unbiased, gpu="B200", precision="mxfp8", fused_experts=each) for each in (False, True))
    assert plain.pieces[1].work.traffic - fused.pieces[1].work.traffic == 3 * sent / 2 * 2880
    assert runs[1].forward(fused.pieces[1]).matmuls < runs[0].forward(plain.pieces[1]).matmuls
    assert fused.pieces[1].work.again == plain.pieces[1].work.again  # what is computed again is a pass of its own
