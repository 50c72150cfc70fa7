"""Mixtures of experts in the estimate of a transformer: what each rank has, computes, sends and saves."""

import math
from collections import Counter
from dataclasses import replace
from itertools import combinations, product
from statistics import mean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.transformers import GPT, layer, made

from optpipe import InputError
from optpipe.transformer.estimate import estimate
from optpipe.transformer.presets import GPUS, MODELS
from optpipe.transformer.records import Parallelism, Run, Transformer
from optpipe.transformer.work import Collective, Matmul, Routing


def test_experts_are_divided_among_their_ranks_and_are_not_in_every_layer():
    experts = {"experts": 8, "experts_per_token": 2, "expert_ffn": 512, "expert_every": 2, "dense_layers": 2}
    shape = GPT.model_copy(update=experts)
    one, four = made(shape, {"dp": 4}), made(shape, {"dp": 4, "ep": 4})
    assert [piece.kind for piece in one.pieces] == ["embedding", "dense", "dense", "dense", "expert", "head"]
    assert four.pieces[4].expert_weights == one.pieces[4].expert_weights / 4
    assert [each.over for each in four.pieces[4].work.sent] == ["experts"]
    assert one.pieces[4].work.sent == ()
    dense, experts = (sum(getattr(p, what) for p in four.pieces) for what in ("weights", "expert_weights"))
    divided = made(shape, {"dp": 4, "ep": 4, "zero": 1}).devices[0]
    assert divided.optimizer == pytest.approx(12 * (dense / 4 + experts), abs=1)


def test_tokens_for_experts_on_other_nodes_leave_by_the_card_of_their_gpu():
    """Of 15 other GPUs 8 are on the other node; with tensor parallelism 2 there are four of the group on each."""
    nbytes, gpu, links = 15e9, GPUS["A100"], made(gpu="A100").clock.links
    card, link = gpu.network_bytes_per_s * gpu.network_fraction, gpu.link_bytes_per_s * gpu.link_fraction
    sent = Collective("experts", nbytes, 0)
    assert links.exchange_ms(sent, 16, 1) == pytest.approx(8e12 / card)
    assert links.exchange_ms(sent, 16, 2) == pytest.approx(12e12 / card)
    assert links.exchange_ms(sent._replace(steps=7), 8, 1) == pytest.approx(15e12 / link + 7 * gpu.link_us / 1000)


@pytest.mark.parametrize(
    ("nodes", "near", "experts", "copies", "groups", "chosen"),
    [(2, 2, 4, 3, 1, 1), (1, 4, 8, 2, 1, 1), (4, 1, 8, 3, 1, 1), (4, 1, 8, 2, 4, 2), (2, 2, 8, 3, 4, 3)],
)
def test_a_token_is_sent_once_to_each_gpu_and_crosses_the_network_once_for_each_node(
    nodes, near, experts, copies, groups, chosen
):
    """The mean over all ways in which a token's experts may be chosen, of groups as many each; of GPU 0, whose own are
    not sent."""
    ranks, gpu = nodes * near, GPUS["A100"].model_copy(update={"gpus_per_node": near, "link_us": 0.0})
    links = replace(made(gpu="A100").clock.links, gpu=gpu)

    def is_way(way: tuple[int, ...]) -> bool:
        of_group = Counter(expert * groups // experts for expert in way)
        return groups == 1 or (len(of_group) == chosen and len(set(of_group.values())) == 1)

    ways = [{e * ranks // experts for e in way} for way in combinations(range(experts), copies) if is_way(way)]
    to_gpus = mean(len(way - {0}) for way in ways)
    to_nodes = mean(len({rank // near for rank in way} - {0}) for way in ways)
    token = 1e9  # bytes of a single copy
    every = Collective("experts", token * copies * (1 - 1 / ranks), 0)
    card, link = gpu.network_bytes_per_s * gpu.network_fraction, gpu.link_bytes_per_s * gpu.link_fraction
    once = links.exchange_ms(every._replace(routing=Routing(experts, copies, groups, chosen)), ranks, 1)
    assert once == pytest.approx(1000 * token * max(to_gpus / link, to_nodes / card))
    assert once <= links.exchange_ms(every, ranks, 1) * (1 + 1e-9)


def test_a_token_of_deepseek_v3_reaches_the_experts_of_four_nodes():
    """8 groups of experts on 8 nodes, of which a token takes 4; an exchange of all ranks has one latency."""
    (sent,) = (each for each in made(MODELS["deepseek-v3"], {"dp": 64, "ep": 64}, dispatch="once").pieces[-2].work.sent)
    assert sent.routing
    assert sent.routing.reached(8) == 0.5
    assert Routing(256, 8, 1, 1).reached(8) > 0.65
    assert sent.steps == 2
    with pytest.raises(InputError, match=r"expert_groups = 7: must divide experts = 256"):
        Transformer.from_dict(MODELS["deepseek-v3"].model_dump() | {"expert_groups": 7}, "shape")
    few = {"expert_groups": 64, "groups_per_token": 1}
    with pytest.raises(InputError, match=r"experts_per_token = 8: 1 of 64 expert_groups have 4 experts"):
        Transformer.from_dict(MODELS["deepseek-v3"].model_dump() | few, "shape")


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 8), st.integers(1, 16))
def test_no_token_goes_to_more_gpus_than_it_has_experts(groups, chosen, copies):
    """Of experts on a GPU each it goes to as many, also where groups have not as many each."""
    chosen = min(chosen, groups, copies)
    copies = min(copies, chosen * 64 // groups)
    assert 64 * Routing(64, copies, groups, chosen).reached(64) == pytest.approx(copies)


def test_a_fuller_gpu_computes_longer_but_the_model_is_the_same():
    even, uneven = (made(EXPERTS, {"dp": 8, "ep": 8}, expert_load=load) for load in (1.0, 2.0))
    assert uneven.model_flops == even.model_flops
    assert uneven.busy_ms[0] > even.busy_ms[0]
    assert uneven.utilization < even.utilization


@given(st.integers(0, 99), st.sampled_from([1, 2, 8]), st.floats(0.3, 3.9), st.booleans())
def test_no_expert_takes_more_tokens_than_its_capacity(seed, ep, factor, pads):
    """Megatron-core 0.16.1, moe_utils.py's `apply_router_token_dropping`: of each expert the most probable tokens stay,
    with padding also those that were not routed to it. One GPU's tokens; GPUs of experts get what stays."""
    tokens, experts, copies = 512, 8, 2
    random = np.random.default_rng(seed)
    probabilities = random.random((tokens, experts)) * random.random(experts)
    routed = np.argsort(np.argsort(-probabilities, axis=1), axis=1) < copies
    kept = np.zeros_like(routed)
    for expert, column in enumerate((probabilities * routed).T):
        kept[np.argsort(-column)[: math.ceil(tokens * copies / experts * factor)], expert] = True
    kept = kept if pads else kept & routed
    before, after = (each.sum(axis=0).reshape(ep, -1).sum(axis=1).max() for each in (routed, kept))
    run = {"moe_expert_capacity_factor": factor, "moe_pad_expert_input_to_capacity": pads}
    load = before * ep / (tokens * copies)
    piece = layer(EXPERTS.model_copy(update={"dense_layers": 0}), {"dp": 8, "ep": ep}, expert_load=load, **run)
    (most,) = (each.rows * each.copies for each in piece.work.matmuls if each.depth == EXPERTS.expert_ffn)
    assert after == pytest.approx(most / ep) if pads else after <= most / ep * (1 + 1e-9)
    assert most <= load * tokens * copies * (1 + 1e-9) or pads
    (back,) = (each.bytes for each in piece.saved if each.name == "experts' output")
    numbers = float(kept.sum() * EXPERTS.hidden)
    assert back == pytest.approx(2 * numbers) if pads else 2 * numbers <= back * (1 + 1e-9)


def test_a_capacity_is_refused_where_there_is_none():
    with pytest.raises(
        InputError, match=r"^moe_expert_capacity_factor = 1.5: expected none, as the model has no experts"
    ):
        made(moe_expert_capacity_factor=1.5)
    with pytest.raises(InputError, match=r"moe_expert_capacity_factor = 5: expected at most 4, which are all tokens"):
        made(EXPERTS, moe_expert_capacity_factor=5)
    with pytest.raises(InputError, match=r"moe_pad_expert_input_to_capacity = true: needs moe_expert_capacity_factor"):
        made(EXPERTS, moe_pad_expert_input_to_capacity=True)
    dropping = made(EXPERTS, moe_expert_capacity_factor=0.5)
    assert dropping.model_flops == made(EXPERTS).model_flops
    assert dropping.busy_ms[0] < made(EXPERTS).busy_ms[0]


@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (4, 1)])
@pytest.mark.parametrize("shared", [0, 1024])
def test_parts_of_an_expert_gather_each_copy_of_a_token(ep, etp, shared):
    """Megatron-core 0.16.1, token_dispatcher.py: all-gather after the all-to-all, reduce-scatter before that back."""
    model = EXPERTS.model_copy(update={"shared_ffn": shared})

    def sent(dispatch: str) -> tuple[list[float], float]:
        piece = made(model, {"tp": 4, "dp": 4, "ep": ep, "etp": etp}, dispatch=dispatch).pieces[-2]
        attention, *rest = (each.bytes for each in piece.work.sent if each.over == "tensor")
        return rest, attention

    every, whole = sent("alltoall")  # `whole` is 2 · 3/4 of all tokens
    shares = [1.0] * (shared > 0) + [2 * etp / 4 * (etp - 1) / etp / 1.5 * model.experts_per_token] * (etp > 1)
    assert every == pytest.approx([share * whole for share in shares])
    assert sum(sent("once")[0]) <= sum(every)
    if ep == 1 < etp and not shared:
        assert sent("once")[0] == pytest.approx([share * whole / model.experts_per_token for share in shares])


def test_matmuls_of_experts_compute_and_read_in_turn():
    clock, grouped = made(gpu="B200").clock, Matmul(128, 4096, 7168, 256)
    moved = clock.pass_ms(2 * (grouped.operands + grouped.outputs))
    computed = clock.matmul_ms(grouped._replace(rows=10**6)) / 10**6 * 128
    assert clock.matmul_ms(grouped, grouped=True) == pytest.approx(computed + moved)
    assert clock.matmul_ms(grouped) == pytest.approx(max(computed, moved))


EXPERTS = GPT.model_copy(update={"experts": 8, "experts_per_token": 2, "expert_ffn": 4096, "dense_layers": 1})


def test_pairs_hide_all_to_all_of_experts():
    """What a pair of each two stages computes and sends, as `times` has it, and 3.7 % of the shorter."""
    division = {"pp": 2, "chunks": 2, "dp": 8, "ep": 8}
    e = made(EXPERTS, division, overlap="experts")
    sent = [e.clock.links.collectives_ms(piece.work.sent, "experts") for piece in e.pieces]
    of_stage = [sum(sent[i] for i in stage) for stage in e.stages]
    assert of_stage[0] < of_stage[1], "its first layer is dense"
    for s, stage in enumerate(e.problem.stages):
        assert stage.forward_exchange * stage.forward_ms == pytest.approx(of_stage[s])
        assert stage.backward_exchange * stage.backward_input_ms == pytest.approx(of_stage[s])
    for (s, one), (t, other) in product(enumerate(e.problem.stages), repeat=2):
        whole = one.forward_ms + other.backward_input_ms + other.backward_weight_ms
        longer = max(of_stage[s] + of_stage[t], whole - of_stage[s] - of_stage[t])
        lasts = max(longer + 0.0367 * (whole - longer), one.forward_ms, other.backward_input_ms)
        assert e.problem.pair_factors[s, t] == pytest.approx(lasts / whole, abs=1e-6)
    for other in ({"overlap": "all"}, {"overlap": "experts", "recompute": "full"}):
        assert made(EXPERTS, division, **other).problem.overlap_factor is None
    assert made(EXPERTS, {"pp": 2}, overlap="experts").problem.overlap_factor is None
    with pytest.raises(InputError, match=r"^overlap = experts: expected none, replicas or all, as the model has no"):
        made(GPT, overlap="experts")


@given(
    st.sampled_from([1, 2, 8]),
    st.integers(0, 3),
    st.sampled_from(["none", "replicas", "all"]),
    st.floats(0, 1e4),
    st.floats(1e-3, 1),
)
def test_no_op_hides_more_than_half_of_what_it_sends_or_longer_than_its_matmuls(tp, zero, overlap, link_us, fraction):
    """Of tensor parallelism, reductions and gathers together; after the schedule no longer than a micro-batch."""
    gpu = GPUS["H100"].model_copy(update={"link_us": link_us, "link_fraction": fraction})
    plain, hidden = (
        estimate(GPT, Parallelism(tp=tp, dp=4, zero=zero), gpu, Run(microbatches=1, overlap=each))
        for each in ("none", overlap)
    )
    for piece in plain.pieces:
        for op in ("forward", "backward_input", "backward_weight"):
            before, after = (getattr(each.clock, op)(piece) for each in (plain, hidden))
            saved = before.messages - after.messages
            most = before.messages / 2 if overlap == "all" or (overlap == "replicas" and zero >= 2) else 0.0
            assert -1e-9 <= saved <= min(most, before.matmuls) + 1e-9 * before.messages
            assert before._replace(messages=0.0) == after._replace(messages=0.0)
    saved = plain.after_ms - hidden.after_ms
    assert 0 <= saved <= (min(hidden.busy_ms) if overlap != "none" else 0.0) + 1e-9 * plain.after_ms


def test_megatron_core_saves_nothing_that_comes_back_from_experts():
    """Its weights of tokens multiply in the activation function; else k·b·s·h numbers of 16 bits wait for them."""
    whole, less = (layer(MODELS["mixtral-8x7b"], fused_gradients=each) for each in (False, True))
    assert whole.activation_bytes("none") - less.activation_bytes("none") == 2 * 2 * 4096 * 4096


def test_undivided_experts_are_spread_over_tensor_parallel_ranks_too():
    """A GPU has as many weights, tokens and operations of experts as where each expert is divided."""
    model = MODELS["mixtral-8x7b"]
    divided = made(model, {"tp": 4, "dp": 2, "ep": 2})
    whole = made(model, {"tp": 4, "dp": 2, "ep": 8, "etp": 1})
    one, other = divided.pieces[1], whole.pieces[1]
    assert other.expert_weights == one.expert_weights
    assert other.work.matmul == pytest.approx(one.work.matmul)
    assert other.activation_bytes("none") < one.activation_bytes("none")  # tokens' inputs are not gathered
    assert whole.parallelism.expert_replicas == divided.parallelism.expert_replicas == 1
    assert whole.model_flops == pytest.approx(divided.model_flops)
    few = made(model, {"tp": 4, "dp": 2, "ep": 2, "etp": 1})  # four times the experts, on a quarter of the tokens
    assert few.pieces[1].expert_weights == 4 * one.expert_weights
    assert few.parallelism.expert_replicas == 4
    partly = made(model, {"tp": 4, "dp": 2, "ep": 4, "etp": 2})  # half of an expert, of half of the tokens
    assert partly.pieces[1].expert_weights == one.expert_weights
    assert partly.pieces[1].work.matmul == pytest.approx(one.work.matmul)
    assert partly.parallelism.expert_replicas == 1


@pytest.mark.parametrize(
    ("division", "said"),
    [
        ({"tp": 2, "dp": 4, "ep": 8}, "ep = 8: must divide dp · cp = 4, or with etp 1 tp · dp · cp = 8"),
        ({"tp": 2, "dp": 4, "ep": 16, "etp": 1}, "ep = 16: must divide tp · dp · cp = 8"),
        ({"tp": 4, "dp": 4, "ep": 2, "etp": 3}, "etp = 3: must divide tp = 4"),
        ({"tp": 4, "dp": 2, "ep": 8, "etp": 2}, "ep = 8: must divide tp · dp · cp / etp = 4, or with etp 1 .* = 8"),
    ],
)
def test_experts_that_do_not_divide_are_refused(division, said):
    with pytest.raises(InputError, match=said):
        Parallelism.from_dict(division)
