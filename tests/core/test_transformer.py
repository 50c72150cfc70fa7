"""The cost model: the papers' formulas, what parallelism divides, presets, and problems that can be solved."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.transformers import GPT, layer, made

from optpipe import InputError, Problem, check, offload_ratio
from optpipe.transformer.estimate import estimate
from optpipe.transformer.presets import GPUS, MODELS
from optpipe.transformer.records import Parallelism, Run
from optpipe.transformer.times import Times
from optpipe.transformer.work import Matmul
from optpipe_solver import systems


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


@pytest.mark.parametrize("name", MODELS)
def test_a_problem_of_each_preset_can_be_scheduled(name):
    """GPUs enough that the state fits; as many micro-batches in flight as 1F1B needs, or activations leave."""
    ep = 8 if name in ("deepseek-v3", "kimi-k2", "qwen3-235b-a22b") else 1  # their experts are too many for one GPU
    e = made(MODELS[name], {"pp": 4, "tp": 8, "dp": 8, "ep": ep, "zero": 1}, gpu="B200", recompute="cheap")
    problem = e.problem
    assert Problem.from_json(problem.to_json()) == problem
    assert len(problem.layers or ()) == MODELS[name].layers + 2
    assert check(problem, systems.generate("1f1b", problem)) == []
    assert all(k is not None and k > 0 for k in offload_ratio(problem))
    assert 0 < e.utilization < 1


def test_the_mfu_of_a_measured_iteration():
    """Korthikanti et al. 2023, Table 5: GPT-3 175B on 64 A100 takes 13.75 s for 64 sequences, an MFU of 51.4 %."""
    e = made(MODELS["gpt-3-175b"], {"pp": 8, "tp": 8}, gpu="A100", microbatches=64)
    assert e.utilization_in(13750) == pytest.approx(0.514, abs=0.001)
    twice = made(MODELS["gpt-3-175b"], {"pp": 8, "tp": 8, "dp": 2}, gpu="A100", microbatches=64)
    assert twice.utilization_in(13750) == pytest.approx(e.utilization_in(13750))


def test_layers_that_are_left_over_go_to_stages_without_embedding_and_head():
    """PipeOffload, section 5: one layer fewer in the first and the last stage. Its 10.5B model has 38 on 8 devices."""
    assert made(MODELS["pipeoffload-10.5b"], {"pp": 8}, gpu="B200").cuts == (5,) * 8
    assert made(GPT, {"pp": 2, "layers": (1, 3)}).cuts == (2, 4)


def test_neighbours_share_a_host_link_only_if_they_are_neighbours_in_the_node():
    alone, divided = made(GPT, {"pp": 4}, gpu="A100"), made(GPT, {"pp": 4, "tp": 2}, gpu="A100")
    assert [device.link for device in alone.problem.devices] == ["host 0", "host 0", "host 1", "host 1"]
    assert {device.link for device in divided.problem.devices} == {None}
    assert divided.clock.links.host_speed == alone.clock.links.host_speed / 2


def test_messages_to_other_nodes_take_the_network():
    eight = GPT.model_copy(update={"layers": 8})
    near, far = made(eight, {"pp": 8}), made(eight, {"pp": 8, "tp": 2})
    gpu = GPUS["H100"]
    latency, link, network = gpu.link_us / 1000, 450e9 * gpu.link_fraction, 50e9 * gpu.network_fraction
    assert near.problem.p2p_ms == pytest.approx(1000 * 2 * 512 * 1024 / link + latency)
    assert far.problem.p2p_ms == pytest.approx(1000 * 512 * 1024 / network + latency)
    nine = made(GPT.model_copy(update={"layers": 9}), {"pp": 3, "dp": 3})  # a GPU more than a node has
    assert nine.message_ms == pytest.approx(1000 * 2 * 512 * 1024 / network + latency)
    whole = made(eight, {"pp": 8, "tp": 2, "sequence_parallel": False})  # sent in halves, and gathered
    assert whole.problem.p2p_ms == pytest.approx(far.problem.p2p_ms + 1000 * 512 * 1024 / link + latency)


def test_a_ring_leaves_a_node_by_all_network_cards_only_if_it_has_all_its_gpus():
    nbytes, gpu, links = 1e9, GPUS["A100"], made(gpu="A100").clock.links
    card_ms = 1000 * nbytes / (gpu.network_bytes_per_s * gpu.network_fraction)
    for ranks, stride, expected_ms in ((16, 1, card_ms / 8), (16, 2, card_ms), (2, 8, card_ms)):
        assert links.ring_ms(nbytes, ranks, stride, steps=0) == pytest.approx(expected_ms)
    assert links.ring_ms(nbytes, 8, 1, steps=0) == pytest.approx(1000 * nbytes / (gpu.link_bytes_per_s * 0.75))
    assert links.ring_ms(0.0, 8, 1, steps=14) == pytest.approx(14 * gpu.link_us / 1000)
    assert links.ring_ms(nbytes, 1, 1, steps=1) == 0
    fast = replace(links, gpu=gpu.model_copy(update={"network_bytes_per_s": gpu.link_bytes_per_s / 2}))
    assert fast.ring_ms(nbytes, 16, 1, steps=0) == links.ring_ms(nbytes, 8, 1, steps=0)  # links are slower


def test_weights_are_gathered_once_for_a_backward_that_recomputes():
    """Zero 3 adds two gathers and, in W, a reduction, whatever is recomputed."""

    def added_ms(recompute: str) -> float:
        plain, divided = (made(division={"dp": 8, "zero": zero}, recompute=recompute) for zero in (0, 3))
        return divided.device_times[0].ms - plain.device_times[0].ms

    assert added_ms("full") == pytest.approx(added_ms("none"))


@given(st.integers(64, 8192), st.integers(64, 8192), st.integers(16, 8192))
def test_small_matmuls_reach_less_of_the_gpu(rows, columns, depth):
    """At `matmul_depth` half of the fraction; never less time than their bytes take."""
    clock, gpu = made().clock, GPUS["H100"]
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


@pytest.mark.parametrize("gpu", ["B200", "B300", "GB200", "GB300"])
def test_fewer_bits_are_computed_faster_in_layers_but_not_in_the_head(gpu):
    """Rounding reads 16 bits and writes the others twice, in F of what matmuls take, in B of what comes back."""
    precisions = ("bf16", "mxfp8", "nvfp4")
    wide, *narrow = (made(MODELS["llama-3-8b"], gpu=gpu, precision=each, microbatch_size=4) for each in precisions)
    assert [e.clock.forward(e.pieces[-1]) for e in narrow] == [wide.clock.forward(wide.pieces[-1])] * 2
    times = [e.clock.forward(e.pieces[1]) for e in (wide, *narrow)]
    assert times[0].matmuls > times[1].matmuls > times[2].matmuls
    taken = sum(each.rows * each.depth for each in wide.pieces[1].work.matmuls)
    for e, ms, bits in zip(narrow, times[1:], (8, 4), strict=True):
        assert ms.passes == pytest.approx(times[0].passes + e.clock.pass_ms((2 + 2 * bits / 8) * taken))


def test_only_what_there_is_to_hide_under_hides_messages():
    """Half of what tensor-parallel ranks send, at most for as long as matmuls take; reductions under a micro-batch."""

    def ops(overlap: str, **gpu: float) -> tuple[Times, float]:
        slow = GPUS["H100"].model_copy(update=gpu)
        e = estimate(GPT, Parallelism(tp=8, dp=4, zero=1), slow, Run(microbatches=1, overlap=overlap))
        return e.clock.forward(e.pieces[1]), e.after_ms

    plain, hidden = ops("none")[0], ops("all")[0]
    assert hidden.messages == pytest.approx(plain.messages - min(plain.messages / 2, plain.matmuls))
    late, mostly_late = ops("none", link_us=1e5)[0], ops("all", link_us=1e5)[0]
    assert mostly_late.messages == pytest.approx(late.messages - late.matmuls)
    assert ops("replicas")[0] == plain
    for zero, op in ((3, "forward"), (2, "backward_weight")):
        runs = (made(GPT, {"dp": 4, "zero": zero}, overlap=each).clock for each in ("none", "replicas"))
        plain, hidden = (getattr(clock, op)(layer(GPT, {"dp": 4, "zero": zero})) for clock in runs)
        assert hidden.messages == pytest.approx(plain.messages - min(plain.messages / 2, plain.matmuls))
        assert hidden.messages < plain.messages
    slow_network = {"network_fraction": 1e-6}
    assert ops("none", **slow_network)[1] > ops("replicas", **slow_network)[1] > 0.99 * ops("none", **slow_network)[1]


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


def test_recomputation_trades_bytes_for_time_and_the_last_level_is_the_pair():
    each = [made(recompute=level, attention="unfused").layers[1] for level in ("none", "selective", "cheap", "full")]
    for before, after in pairwise(each):
        assert after.activation_bytes < before.activation_bytes
        assert after.backward_input_ms > before.backward_input_ms
    assert each[-1].backward_input_ms == pytest.approx(each[0].backward_input_ms + each[0].forward_ms)
    assert [cost.can_recompute for cost in each] == [True, True, True, False]
    with_levels, pair = (made(attention="unfused", levels=each).problem.layers for each in (True, False))
    inner = next(k for k, layer in enumerate(pair) if layer.can_recompute)
    (full,), levels = pair[inner].all_levels, with_levels[inner].all_levels
    assert [level.name for level in levels] == ["selective", "cheap", "full"]
    assert all(a.checkpoint_bytes > b.checkpoint_bytes for a, b in pairwise(levels))
    assert all(a.recompute_ms < b.recompute_ms for a, b in pairwise(levels))
    assert all(level.offload_bytes == level.checkpoint_bytes for level in levels)
    assert (levels[-1].recompute_ms, levels[-1].checkpoint_bytes) == (full.recompute_ms, full.checkpoint_bytes)


def test_a_sliding_window_leaves_out_scores():
    """Of s = 4w tokens the first w queries attend to what came before, the others to w keys."""
    s, w = 4096, 1024
    shape = GPT.model_copy(update={"window": w, "full_layers": (3,)})
    slides, whole = (made(shape, sequence=s).pieces[i].work.scores for i in (1, 4))
    assert slides / whole == (w * (w + 1) // 2 + (s - w) * w - w // 2) / (s**2 // 2)
    no_longer = made(shape.model_copy(update={"window": s}), sequence=s).pieces[1]
    assert no_longer == made(shape, sequence=s).pieces[4]
    assert made(shape, sequence=s, attention="unfused").pieces[1].work.scores == 2 * whole


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
    fits_not = made(MODELS["gpt-3-175b"], {"pp": 4, "tp": 8})
    assert fits_not.devices[0].budget < 0
    with pytest.raises(InputError, match=r"device 0 needs 104\.1 GB without any activation, the GPU has 84\.9"):
        _ = fits_not.problem


@pytest.mark.parametrize(
    ("gpu", "gib"),
    [("A100", 79.15), ("H100", 79.1), ("H200", 139.8), ("B200", 178.35), ("B300", 268.59), ("MI300X", 191.69)],
)
def test_a_gpu_has_the_memory_that_torch_reports(gpu, gib):
    """Its total capacity, as in errors about memory and in `torch.cuda.get_device_properties`."""
    assert GPUS[gpu].memory_bytes / 2**30 == pytest.approx(gib, abs=0.01)


def test_matmuls_that_add_to_gradients_leave_empty_ones_of_16_bits():
    """Of each shape of a layer's weights; experts share theirs."""
    runs = (made(MODELS["mixtral-8x7b"], {"tp": 2}, fused_gradients=each).devices[0] for each in (True, False))
    fused, plain = (memory.workspace for memory in runs)
    attention = 2 * 4096 * (4096 + 1024) / 2
    vectors = 2 * 4096 + 8 * 4096  # two norms, and the router
    assert fused - plain == pytest.approx(2 * (attention + vectors))


@pytest.mark.parametrize(("precision", "bits"), [("fp8", 8), ("mxfp8", 8), ("nvfp4", 4)])
@pytest.mark.parametrize("attention", ["flash", "unfused"])
def test_operands_that_are_rounded_are_saved_so_where_matmuls_add_to_gradients(precision, bits, attention):
    """12·b·s·h bytes of 16 bits beside the projection's 2·b·s·h, which flash attention saves as they are, too."""
    bsh, share, run = 512 * 1024, bits / 16, {"attention": attention, "gpu": "B200"}
    wide, fused = (layer(**run, fused_gradients=each) for each in (False, True))
    assert wide == fused == replace(layer(**run, precision=precision), work=wide.work)
    narrow = layer(**run, precision=precision, fused_gradients=True)
    kept = 2 * bsh * (attention == "flash")
    assert narrow.activation_bytes("none") == wide.activation_bytes("none") - 14 * bsh * (1 - share) + kept
    assert narrow.saved_for_weight_bytes == wide.saved_for_weight_bytes - 14 * bsh * (1 - share)


def test_heads_of_several_predictions_go_back_one_after_the_other():
    """So that there are gradients of one head's logits at a time, however many wait from B until W."""
    one, three = (made(mtp=modules) for modules in (0, 2))
    assert one.devices[0].workspace == 2 * 512 * 50000 == three.devices[0].workspace
    assert three.pieces[-1].gradients == 3 * one.pieces[-1].gradients


def test_buffers_of_all_messages_are_counted_where_they_stay():
    """A middle device receives two messages of each micro-batch."""
    here, there = made(division={"pp": 4}), made(division={"pp": 4}, keep_received=True)
    more = [b.workspace - a.workspace for a, b in zip(here.devices, there.devices, strict=True)]
    assert more == [2 * 512 * 1024 * (8 * ends - 4) for ends in (1, 2, 2, 1)]


@pytest.mark.parametrize(
    ("division", "run", "share"),
    [
        ({}, {"recompute": "cheap"}, 2 / 10),  # PipeOffload: activations are ten times a layer's output
        ({}, {"recompute": "selective"}, 2 * 2 / 34),
        ({"tp": 2}, {"recompute": "selective"}, 2 * 2 / 34),
        ({"tp": 2, "sequence_parallel": False}, {"recompute": "selective"}, 2 * 1 / (10 + 24 / 2)),
    ],
)
def test_messages_beside_the_copies_of_a_layer(division: dict[str, Any], run: dict[str, Any], share: float) -> None:
    """One layer a stage: each activation goes with two messages, of a rank that shares them with others its part."""
    estimated = made(GPT, {"pp": 4, **division}, attention="unfused", **run)
    assert estimated.messages_beside_copies == pytest.approx(share)
    assert made(GPT, division, attention="unfused", **run).messages_beside_copies == 0


@pytest.mark.parametrize(
    ("division", "near"), [({}, 8), ({"tp": 2}, 4), ({"dp": 4}, 2), ({"tp": 8}, 1), ({"dp": 3}, 1)]
)
def test_devices_name_their_node_where_they_share_its_host_memory(division: dict[str, int], near: int) -> None:
    """In the order of Megatron-LM's ranks, stages last: 8 GPUs a node."""
    shape = GPT.model_copy(update={"layers": 16})
    limited = made(shape, {"pp": 16, **division}, host_memory_bytes=10**9).problem
    names = [f"node {d // near}" if near > 1 else None for d in range(16)]
    assert [device.node for device in limited.devices] == names
    assert not any(device.node for device in made(shape, {"pp": 16, **division}).problem.devices)
    assert limited.costs.host_memory.tolist() == [near * 10**9] * 16
