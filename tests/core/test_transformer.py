"""The cost model: the papers' formulas, what parallelism divides, presets, configs, and problems that can be solved."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import InputError, Problem, check, offload_ratio
from optpipe.transformer.estimate import Estimate, estimate
from optpipe.transformer.huggingface import read
from optpipe.transformer.presets import GPUS, MODELS
from optpipe.transformer.records import Parallelism, Run, Transformer
from optpipe.transformer.work import Matmul, Piece
from optpipe_solver import systems

GPT = Transformer(layers=4, hidden=1024, ffn=4096, heads=16, vocabulary=50000, sequence=512, dropout=True)
LLAMA_CONFIG = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
MOE_CONFIG = {
    **LLAMA_CONFIG,
    "model_type": "qwen3_moe",
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 2,
}


def made(shape: Transformer = GPT, division: dict[str, Any] | None = None, gpu: str = "H100", **run: Any) -> Estimate:
    return estimate(shape, Parallelism(**division or {}), GPUS[gpu], Run(**{"microbatches": 8} | run))


def layer(shape: Transformer = GPT, division: dict[str, Any] | None = None, **run: Any) -> Piece:
    return made(shape, division, **run).pieces[1]


@pytest.mark.parametrize("b", [1, 3])
def test_a_layer_saves_what_the_papers_say(b):
    """Korthikanti et al. 2023: Eq. 1, and Table 2's rows for recomputation; PipeOffload, appendix C; Zero Bubble."""
    s, h, a = 512, 1024, 16
    unfused = layer(microbatch_size=b, attention="unfused")
    assert unfused.activation_bytes("none") == 34 * b * s * h + 5 * a * s**2 * b
    assert unfused.activation_bytes("selective") == 34 * b * s * h
    assert unfused.activation_bytes("cheap") == 20 * b * s * h
    assert unfused.activation_bytes("full") == 2 * b * s * h
    assert unfused.saved_for_weight_bytes == 32 * b * s * h
    assert layer(microbatch_size=b).activation_bytes("cheap") == 20 * b * s * h + 4 * a * s * b


@pytest.mark.parametrize("t", [2, 8])
def test_tensor_and_sequence_parallelism_divide_as_in_the_paper(t):
    """Korthikanti et al. 2023, Eq. 2 and 4."""
    bsh, scores = 512 * 1024, 5 * 16 * 512**2
    whole = layer(GPT, {"tp": t, "sequence_parallel": False}, attention="unfused")
    assert whole.activation_bytes("none") == bsh * 10 + (bsh * 24 + scores) / t
    assert layer(GPT, {"tp": t}, attention="unfused").activation_bytes("none") == (34 * bsh + scores) / t


def test_the_work_of_a_model_is_that_of_the_paper():
    """Narayanan et al. 2021: 72·b·s·l·h²(1 + s/6h + V/12lh) operations, without recomputation."""
    b, s, l, h, v = 2, 512, 4, 1024, 50000
    for run in ({}, {"attention": "unfused"}, {"recompute": "full"}):
        operations = made(microbatch_size=b, **run).model_flops
        assert operations == pytest.approx(72 * b * s * l * h**2 * (1 + s / (6 * h) + v / (12 * l * h)))


def test_each_matmul_takes_one_forward_for_each_gradient_and_scores_have_no_weights():
    """Where nothing but matmuls and scores takes time."""
    fast = {"memory_bytes_per_s": 1e20, "matmul_fraction": 1.0, "matmul_depth": 0.0, "host_us": 0.0}
    gpu = GPUS["H100"].model_copy(update=fast)
    e = estimate(GPT, Parallelism(), gpu, Run(microbatches=1, attention="unfused"))
    dense, work = e.layers[1], e.pieces[1].work
    matmul, scores = (1000 * operations / gpu.flops["bf16"] for operations in (work.matmul, work.scores))
    assert dense.forward_ms == pytest.approx(matmul + scores)
    assert dense.backward_input_ms == pytest.approx(matmul + 2 * scores)
    assert dense.backward_weight_ms == pytest.approx(matmul)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.integers(0, 3))
def test_parallelism_divides_what_it_divides(tp, dp, cp, zero):
    alone, divided = made().pieces[1], made(GPT, {"tp": tp, "dp": dp, "cp": cp, "zero": zero})
    piece = divided.pieces[1]
    assert piece.activation_bytes("none") == pytest.approx(alone.activation_bytes("none") / (tp * cp))
    assert piece.work.matmul == pytest.approx(alone.work.matmul / (tp * cp))
    assert piece.work.scores == pytest.approx(alone.work.scores / (tp * cp))
    (memory,), replicas = divided.devices, dp * cp
    numbers = sum(each.weights for each in divided.pieces)
    for name, nbytes, stage in (("weights", 2, 3), ("gradients", 4, 2), ("optimizer", 12, 1)):
        expected = nbytes * numbers / (replicas if zero >= stage else 1)
        assert getattr(memory, name) == pytest.approx(expected, abs=1)


@given(
    st.sampled_from(list(MODELS)), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from(["looped", "v"])
)
def test_bytes_sum_up(name, pp, chunks, shape):
    """Every byte of a GPU is somewhere, all stages have all pieces, and all devices all weights."""
    e = made(MODELS[name], {"pp": pp, "chunks": chunks, "shape": shape, "tp": 8}, gpu="B200")
    for memory in e.devices:
        assert memory.state + memory.workspace + memory.reserved + memory.budget == e.gpu.memory_bytes
    assert [i for pieces in e.stages for i in pieces] == list(range(MODELS[name].layers + 2))
    numbers = sum(piece.weights + piece.expert_weights for piece in e.pieces)
    shared = MODELS[name].tied and (pp == 1 or (shape == "v" and chunks == 2))
    numbers -= MODELS[name].vocabulary * MODELS[name].hidden / 8 if shared else 0
    assert sum(memory.weights for memory in e.devices) == pytest.approx(2 * numbers, rel=1e-6)


def test_experts_are_divided_among_their_ranks_and_are_not_in_every_layer():
    shape = Transformer.from_dict(
        GPT.model_dump()
        | {"experts": 8, "experts_per_token": 2, "expert_ffn": 512, "expert_every": 2, "dense_layers": 2},
        "shape",
    )
    one, four = made(shape, {"dp": 4}), made(shape, {"dp": 4, "ep": 4})
    assert [piece.kind for piece in one.pieces] == ["embedding", "dense", "dense", "dense", "expert", "head"]
    assert four.pieces[4].expert_weights == one.pieces[4].expert_weights / 4
    assert [each.over for each in four.pieces[4].work.sent] == ["experts"]
    assert one.pieces[4].work.sent == ()
    numbers = (sum(getattr(p, what) for p in four.pieces) for what in ("weights", "expert_weights"))
    dense, experts = numbers
    divided = made(shape, {"dp": 4, "ep": 4, "zero": 1}).devices[0]
    assert divided.optimizer == pytest.approx(12 * (dense / 4 + experts), abs=1)


@pytest.mark.parametrize("name", MODELS)
def test_a_problem_of_each_preset_can_be_scheduled(name):
    """GPUs enough that the state fits; as many micro-batches in flight as 1F1B needs, or activations leave."""
    ep = 8 if name == "deepseek-v3" else 1  # its experts are too many for one GPU
    e = made(MODELS[name], {"pp": 4, "tp": 8, "dp": 8, "ep": ep, "zero": 1}, gpu="B200", recompute="cheap")
    problem = e.problem
    assert Problem.from_json(problem.to_json()) == problem
    assert len(problem.layers or ()) == MODELS[name].layers + 2
    assert check(problem, systems.generate("1f1b", problem)) == []
    assert all(k is not None and k > 0 for k in offload_ratio(problem))
    assert 0 < e.utilization < 1


def test_layers_that_are_left_over_go_to_stages_without_embedding_and_head():
    """PipeOffload, section 5: one layer fewer in the first and the last stage. Its 10.5B model has 38 on 8 devices."""
    e = made(MODELS["pipeoffload-10.5b"], {"pp": 8}, gpu="B200")
    assert e.cuts == (5, 5, 5, 5, 5, 5, 5, 5)
    assert made(GPT, {"pp": 2, "layers": (1, 3)}).cuts == (2, 4)


def test_neighbours_share_a_host_link_only_if_they_are_neighbours_in_the_node():
    alone, divided = made(GPT, {"pp": 4}, gpu="A100"), made(GPT, {"pp": 4, "tp": 2}, gpu="A100")
    assert [device.link for device in alone.problem.devices] == ["host 0", "host 0", "host 1", "host 1"]
    assert {device.link for device in divided.problem.devices} == {None}
    assert divided.clock.host_speed == alone.clock.host_speed / 2


def test_messages_to_other_nodes_take_the_network():
    eight = GPT.model_copy(update={"layers": 8})
    near, far = made(eight, {"pp": 8}), made(eight, {"pp": 8, "tp": 2})
    latency = GPUS["H100"].link_us / 1000
    assert near.problem.p2p_ms == pytest.approx(1000 * 2 * 512 * 1024 / (450e9 * 0.75) + latency)
    assert far.problem.p2p_ms == pytest.approx(1000 * 512 * 1024 / (50e9 * 0.75) + latency)
    nine = made(GPT.model_copy(update={"layers": 9}), {"pp": 3, "dp": 3})  # a GPU more than a node has
    assert nine.message_ms == pytest.approx(1000 * 2 * 512 * 1024 / (50e9 * 0.75) + latency)
    whole = made(eight, {"pp": 8, "tp": 2, "sequence_parallel": False})  # sent in halves, and gathered
    assert whole.problem.p2p_ms == pytest.approx(far.problem.p2p_ms + 1000 * 512 * 1024 / (450e9 * 0.75) + latency)


def test_a_ring_leaves_a_node_by_all_network_cards_only_if_it_has_all_its_gpus():
    """And has the latency of each of its steps."""
    nbytes, gpu = 1e9, GPUS["A100"]
    clock = made(gpu="A100").clock
    card_ms = 1000 * nbytes / (gpu.network_bytes_per_s * gpu.network_fraction)
    for ranks, stride, expected_ms in ((16, 1, card_ms / 8), (16, 2, card_ms), (2, 8, card_ms)):
        assert clock.ring_ms(nbytes, ranks, stride, steps=0) == pytest.approx(expected_ms)
    assert clock.ring_ms(nbytes, 8, 1, steps=0) == pytest.approx(1000 * nbytes / (gpu.link_bytes_per_s * 0.75))
    assert clock.ring_ms(0.0, 8, 1, steps=14) == pytest.approx(14 * gpu.link_us / 1000)
    assert clock.ring_ms(nbytes, 1, 1, steps=1) == 0
    fast = replace(clock, gpu=gpu.model_copy(update={"network_bytes_per_s": gpu.link_bytes_per_s / 2}))
    assert fast.ring_ms(nbytes, 16, 1, steps=0) == clock.ring_ms(nbytes, 8, 1, steps=0)  # links are slower


def test_tokens_for_experts_on_other_nodes_leave_by_the_card_of_their_gpu():
    """Of 15 other GPUs 8 are on the other node; with tensor parallelism 2 there are four of the group on each."""
    nbytes, gpu = 15e9, GPUS["A100"]
    clock = made(gpu="A100").clock
    card, link = gpu.network_bytes_per_s * gpu.network_fraction, gpu.link_bytes_per_s * gpu.link_fraction
    assert clock.exchange_ms(nbytes, 16, 1, steps=0) == pytest.approx(8e12 / card)
    assert clock.exchange_ms(nbytes, 16, 2, steps=0) == pytest.approx(12e12 / card)
    assert clock.exchange_ms(nbytes, 8, 1, steps=7) == pytest.approx(15e12 / link + 7 * gpu.link_us / 1000)


def test_weights_are_gathered_once_for_a_backward_that_recomputes():
    """Zero 3 adds two gathers and, in W, a reduction, whatever is recomputed."""
    added = [
        made(division={"dp": 8, "zero": 3}, recompute=each).device_times[0].ms
        - made(division={"dp": 8}, recompute=each).device_times[0].ms
        for each in ("none", "full")
    ]
    assert added[1] == pytest.approx(added[0])


@given(st.integers(64, 8192), st.integers(64, 8192), st.integers(16, 8192))
def test_small_matmuls_reach_less_of_the_gpu(rows, columns, depth):
    """At `matmul_depth` half of the fraction; never less time than their bytes take."""
    e = made()
    clock, gpu = e.clock, e.gpu
    ms = clock.matmul_ms(Matmul(rows, columns, depth))
    reached = 2e3 * rows * columns * depth / ms / gpu.flops["bf16"]
    assert reached <= gpu.matmul_fraction * depth / (depth + gpu.matmul_depth) * (1 + 1e-9)
    assert ms >= clock.pass_ms(2 * (rows * depth + depth * columns + rows * columns))
    half = clock.matmul_ms(Matmul(8192, 8192, gpu.matmul_depth))
    twice = clock.matmul_ms(Matmul(8192, 8192, 3 * gpu.matmul_depth))  # thrice the work, at 3/4 of the fraction
    assert twice == pytest.approx(2 * half)


def test_attention_has_16_bits_where_matmuls_have_8_and_a_softmax_is_one_kernel_for_a_multiple_of_4_heads():
    unfused = {"attention": "unfused", "microbatch_size": 4}
    times = [made(**unfused, precision=each).device_times[0] for each in ("bf16", "fp8")]
    assert times[1].attention == times[0].attention
    assert times[1].matmuls < times[0].matmuls
    passes = [layer(GPT, {"tp": 8}, attention="unfused", microbatch_size=size).work.passes for size in (1, 2)]
    assert passes == [11, 7]  # two norms, an activation function, two residuals, softmax and its dropout


def test_an_op_takes_as_long_as_its_kernels_or_as_launching_them():
    """The longer of both where they are far apart, at most both together."""
    for size, host_us in ((1, 1e4), (64, 1e-3), (1, 20.0)):
        gpu = GPUS["H100"].model_copy(update={"host_us": host_us})
        e = estimate(GPT, Parallelism(), gpu, Run(microbatches=1, microbatch_size=size))
        times = e.clock.forward(e.pieces[1])
        kernels = times.matmuls + times.attention + times.passes
        launching = 10 * host_us / 1000  # four matmuls, attention, two norms, an activation function, two residuals
        assert max(kernels, launching) <= times.ms <= kernels + launching
        if host_us != 20.0:
            assert times.ms == pytest.approx(max(kernels, launching), rel=1e-2)


def test_recomputation_trades_bytes_for_time():
    each = [made(recompute=level, attention="unfused").layers[1] for level in ("none", "selective", "cheap", "full")]
    for before, after in pairwise(each):
        assert after.activation_bytes < before.activation_bytes
        assert after.backward_input_ms > before.backward_input_ms
    assert each[-1].backward_input_ms == pytest.approx(each[0].backward_input_ms + each[0].forward_ms)
    assert [cost.can_recompute for cost in each] == [True, True, True, False]


def test_levels_keep_less_and_take_longer_and_the_last_one_is_the_pair():
    with_levels, pair = (made(attention="unfused", levels=each).problem.layers for each in (True, False))
    inner = next(k for k, layer in enumerate(pair) if layer.can_recompute)
    (full,), levels = pair[inner].all_levels, with_levels[inner].all_levels
    assert [level.name for level in levels] == ["selective", "cheap", "full"]
    assert all(a.checkpoint_bytes > b.checkpoint_bytes for a, b in pairwise(levels))
    assert all(a.recompute_ms < b.recompute_ms for a, b in pairwise(levels))
    assert all(level.offload_bytes == level.checkpoint_bytes for level in levels)
    assert (levels[-1].recompute_ms, levels[-1].checkpoint_bytes) == (full.recompute_ms, full.checkpoint_bytes)


def test_a_config_says_what_the_preset_says():
    preset, shape = MODELS["llama-2-70b"], read(json.dumps(LLAMA_CONFIG))
    own = {"name", "source", "sequence", "vectors"}
    assert shape.model_dump(exclude=own) == preset.model_dump(exclude=own)
    assert shape.all_vectors == preset.all_vectors


def test_layers_with_experts_of_a_config():
    experts = read(json.dumps({"text_config": MOE_CONFIG}))
    assert [experts.has_experts(i) for i in range(4)] == [False, True, False, True]
    assert (experts.experts, experts.experts_per_token, experts.expert_ffn) == (64, 4, 768)


LATENT_CONFIG = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "tie_word_embeddings": False,
}


def test_a_config_with_latent_attention_is_its_preset():
    own = {"name", "source", "sequence", "query_groups", "vectors"}
    assert read(json.dumps(LATENT_CONFIG)).model_dump(exclude=own) == MODELS["deepseek-v3"].model_dump(exclude=own)


STARCODER2_CONFIG = {
    "model_type": "starcoder2",
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "num_hidden_layers": 30,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "sliding_window": 4096,
    "vocab_size": 49152,
}
GEMMA3_TEXT = {
    "head_dim": 128,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_hidden_layers": 62,
    "num_key_value_heads": 16,
    "sliding_window": 1024,
}
GEMMA3_CONFIG = {"model_type": "gemma3", "text_config": GEMMA3_TEXT, "vision_config": {"model_type": "siglip"}}


@pytest.mark.parametrize(
    ("config", "parameters", "left_out"),
    [
        pytest.param(STARCODER2_CONFIG, 3_030_371_328, [], id="starcoder2-3b: tied, biased"),
        pytest.param({"model_type": "cohere", "vocab_size": 256}, 32_885_776_384, [], id="cohere: tied, few norms"),
        pytest.param(GEMMA3_CONFIG, 27_009_346_304, ["vision_config (siglip)"], id="gemma-3-27b"),
        pytest.param(
            LATENT_CONFIG | {"num_nextn_predict_layers": 1},
            671_026_404_352,
            ["num_nextn_predict_layers = 1 (multi-token prediction)"],
            id="deepseek-v3",
        ),
        pytest.param(
            {"model_type": "opt", "word_embed_proj_dim": 512, "hidden_size": 1024, "ffn_dim": 4096}
            | {"num_hidden_layers": 24, "num_attention_heads": 16, "do_layer_norm_before": False},
            331_196_416,
            [],
            id="opt-350m: projections, and no norm before the head",
        ),
        pytest.param({"model_type": "gpt2"}, 124_439_808, [], id="gpt2"),
        pytest.param(
            {"model_type": "gpt2", "architectures": ["GPT2ForSequenceClassification"]},
            124_439_808,
            ["the head of GPT2ForSequenceClassification: that of a causal language model is taken"],
            id="another head",
        ),
        pytest.param(
            {"model_type": "gpt2", "audio_config": {"model_type": "\x1b[31m"}},
            124_439_808,
            [r"audio_config (\x1b[31m)"],
            id="what a terminal would obey",
        ),
    ],
)
def test_parameters_of_a_config_and_what_is_left_out(config, parameters, left_out):
    """As transformers counts them (`test_config_counts`)."""
    shape = read(json.dumps(config))
    assert made(shape, sequence=512).parameters == parameters
    assert list(shape.left_out) == left_out


def test_a_sliding_window_leaves_out_scores():
    """Of s = 4w tokens the first w queries attend to what came before, the others to w keys."""
    s, w = 4096, 1024
    shape = GPT.model_copy(update={"window": w, "full_layers": (3,)})
    slides, whole = (made(shape, sequence=s).pieces[i].work.scores for i in (1, 4))
    assert slides / whole == (w * (w + 1) // 2 + (s - w) * w - w // 2) / (s**2 // 2)
    no_longer = made(shape.model_copy(update={"window": s}), sequence=s).pieces[1]
    assert no_longer == made(shape, sequence=s).pieces[4]
    assert made(shape, sequence=s, attention="unfused").pieces[1].work.scores == 2 * whole


@pytest.mark.parametrize(
    ("config", "full"),
    [
        (STARCODER2_CONFIG, []),
        ({"model_type": "gemma3_text", "num_hidden_layers": 13}, [5, 11]),
        ({"model_type": "gemma3_text", "num_hidden_layers": 4, "sliding_window_pattern": 2}, [1, 3]),
        (
            {"model_type": "qwen2", "num_hidden_layers": 4, "use_sliding_window": True, "max_window_layers": 3},
            [0, 1, 2],
        ),
        (
            {"model_type": "gpt_oss", "num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]},
            [0],
        ),
    ],
)
def test_layers_with_a_window(config, full):
    shape = read(json.dumps(config))
    assert shape.window > 0
    assert [i for i in range(shape.layers) if not shape.window_of(i)] == full
    for unused in ({"use_sliding_window": False, "sliding_window": 8}, {"sliding_window": None}):
        assert read(json.dumps(LLAMA_CONFIG | {"model_type": "qwen2"} | unused)).window == 0


def test_the_way_down_to_latent_vectors_is_not_divided_and_wide_ones_are_read_and_written():
    shape = MODELS["deepseek-v3"]
    whole, part = (layer(shape, {"tp": t}) for t in (1, 8))
    down, norms = 7168 * (1536 + 512 + 64) + 1536 + 512, 2 * 7168
    assert 8 * (part.weights - down - norms) == pytest.approx(whole.weights - down - norms)
    assert 8 * part.work.matmul == pytest.approx(whole.work.matmul)
    assert 8 * part.activation_bytes("none") == pytest.approx(whole.activation_bytes("none"))

    narrow, wide = (layer(shape.model_copy(update={"kv_latent": n})) for n in (512, 1024))
    assert wide.work.traffic > narrow.work.traffic


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "a config is an object"),
        (json.dumps({**LLAMA_CONFIG, "model_type": "lama"}), "model_type = 'lama'.*did you mean llama"),
        (json.dumps({**LLAMA_CONFIG, "model_type": ["llama"]}), "model_type = a list of 1: only"),
        (json.dumps({"model_type": "deepseek_v2"}), "num_experts_per_tok is missing"),
        (json.dumps({**LLAMA_CONFIG, "vocab_size": None}), "vocab_size is missing"),
        (json.dumps({**LLAMA_CONFIG, "hidden_size": "x"}), "hidden_size = 'x'"),
        (json.dumps({**LLAMA_CONFIG, "num_attention_heads": 0}), "heads = 0"),
        (json.dumps({"model_type": "gemma3", "text_config": [1]}), "text_config = a list of 1: an object"),
        (json.dumps({"model_type": "gemma2", "layer_types": ["linear_attention"]}), "'linear_attention'"),
        (json.dumps({**LATENT_CONFIG, "moe_layer_freq": 2}), "moe_layer_freq = 2"),
        (json.dumps({**LLAMA_CONFIG, "num_key_value_heads": 7}), "query_groups = 7: must divide heads = 64"),
        (json.dumps({**MOE_CONFIG, "mlp_only_layers": [1]}), "mlp_only_layers"),
    ],
)
def test_a_wrong_config_is_one_sentence(text, message):
    with pytest.raises(InputError, match=message) as raised:
        read(text, "config.json")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("division", "run", "message"),
    [
        ({"tp": 3}, {}, "tp = 3: must divide the model's 16 heads"),
        ({"cp": 3}, {}, "cp = 3: must divide the sequence of 512 tokens"),
        ({"dp": 2, "ep": 2}, {}, "ep = 2: must divide the model's 0 experts"),
        ({"pp": 2, "layers": (1, 2)}, {}, "layers add up to 3: the model has 4"),
        ({"pp": 8}, {}, "stage 1 has no layer"),
        ({}, {"precision": "fp8"}, "precision = fp8: A100 has bf16, fp32"),
    ],
)
def test_what_does_not_divide_is_refused(division, run, message):
    with pytest.raises(InputError, match=message):
        made(GPT, division, gpu="A100", **run)


def test_a_model_that_does_not_fit_is_refused_with_what_it_needs():
    e = made(MODELS["gpt-3-175b"], {"pp": 4, "tp": 8})
    assert e.devices[0].budget < 0
    with pytest.raises(InputError, match=r"device 0 needs 104\.1 GB without any activation, the GPU has 85\.9"):
        _ = e.problem
