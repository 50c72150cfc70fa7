"""Iterations by 1F1B, and parameters learned from them: what is hidden in measurements is found again."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.problems import pipeline, stage

from optpipe import InputError
from optpipe.transformer.calibrate import NAMES, calibrate, covariance, gradient, learn, logarithms
from optpipe.transformer.calibrate import with_logarithms as gpu_with
from optpipe.transformer.estimate import estimate
from optpipe.transformer.gpu import PARAMETERS, Extent, Gpu
from optpipe.transformer.iterations import COLUMNS, MEASURED, Iteration, errors, iteration_ms, one_f_one_b
from optpipe.transformer.iterations import read_iterations as read
from optpipe.transformer.kernels import read_kernels
from optpipe.transformer.presets import GPUS, MODELS
from optpipe.transformer.records import Parallelism, Recompute, Run
from optpipe.transformer.times import Clock
from optpipe.transformer.work import Matmul
from optpipe_solver.systems import generate

GPU = GPUS["A100-800G"]
HEAD = ",".join([*COLUMNS.values(), MEASURED])
DATA = os.environ.get("OPTPIPE_ITERATIONS")


def rows(*lines: str) -> list[Iteration]:
    return read("\n".join((HEAD, *lines)))


def timed(rows: Sequence[Iteration], gpu: Gpu) -> list[Iteration]:
    """The rows as they would be measured on such a GPU."""
    return [row._replace(measured_ms=iteration_ms(row.on(gpu))) for row in rows]


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_an_iteration_has_the_makespan_and_the_memory_of_1f1b(data):
    p, chunks, m = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 12))
    draw = st.integers(1, 20)
    figures = [(data.draw(draw), data.draw(draw), data.draw(draw)) for _ in range(p * chunks)]
    message = data.draw(st.integers(0, 5)) / 2
    stages = [stage((f, b, 0), (a, 0), device=s % p) for s, (f, b, a) in enumerate(figures)]
    problem = pipeline(p, m, memory=10**6, stages=stages, p2p_ms=message)
    forward, backward, kept = np.array(figures, float).T
    ms, most = one_f_one_b(forward, backward, kept, message, p, m)
    schedule = generate("1f1b" if chunks == 1 else "interleaved", problem)
    assert ms == pytest.approx(schedule.makespan_ms)
    assert most == [peak.bytes for peak in schedule.compiled.certificate.device]


def test_an_iteration_is_1f1b_of_the_estimate_and_what_comes_after():
    made = estimate(MODELS["llama-3-8b"], Parallelism(pp=4, tp=2, dp=2, zero=1), GPUS["H100"], Run(microbatches=8))
    assert iteration_ms(made) == pytest.approx(generate("1f1b", made.problem).makespan_ms + made.after_ms)
    assert made.after_ms == made.reduction_ms + made.optimizer_ms > 0
    folded = Parallelism(pp=4, chunks=2, shape="v")
    with pytest.raises(InputError, match=r"^shape = v: 1F1B interleaves looped stages$"):
        iteration_ms(estimate(MODELS["llama-3-8b"], folded, GPUS["H100"], Run(microbatches=8)))


def some_rows(count: int, seed: int = 0) -> list[Iteration]:
    """Plans of small and large models on one node and on several."""
    random, lines = np.random.default_rng(seed), []
    while len(lines) < count:
        tp, dp, pp = (2 ** int(random.integers(0, most)) for most in (4, 5, 4))
        size, hidden = 2 ** int(random.integers(0, 4)), 1024 * int(random.integers(1, 9))
        layers, batch = 4 * pp, dp * size * int(random.integers(1, 17))
        lines.append(f"{tp * dp * pp},{batch},{size},{hidden},{16},{layers},1024,{tp},{dp},{pp},1")
    return rows(*lines)


@pytest.mark.parametrize("seed", range(3))
def test_hidden_parameters_are_found_again(seed):
    """From 40 iterations that measure 3 % wrong, three of them twice too long: others are predicted within 5 %, and
    what was learned is within a few standard deviations of what was hidden."""
    random = np.random.default_rng(seed)
    hidden = gpu_with(GPU, logarithms(GPU) + 0.5 * random.normal(size=len(NAMES)) * np.sqrt(np.diag(covariance(GPU))))
    every = some_rows(60, seed)
    wrong = np.exp(0.03 * random.normal(size=60))
    wrong[:3] *= 2
    truth = timed(every, hidden)
    learned = learn(
        GPU, [row._replace(measured_ms=row.measured_ms * w) for row, w in zip(truth[:40], wrong, strict=False)]
    )
    assert errors(truth[40:], [row.measured_ms for row in timed(every[40:], learned)]).mean < 0.05
    away = logarithms(learned) - logarithms(hidden)
    assert away @ np.linalg.inv(covariance(learned)) @ away < 4 * len(NAMES)
    assert (np.diag(covariance(learned)) <= np.diag(covariance(GPU)) + 1e-9).all()
    attention = NAMES.index("attention_fraction")  # flash attention's, which no row has
    assert learned.attention_fraction == pytest.approx(GPU.attention_fraction)
    assert covariance(learned)[attention, attention] == pytest.approx(PARAMETERS["attention_fraction"] ** 2)


def test_parameters_at_their_limits_are_learned_or_refused():
    """A fraction of 1 is one below it in truth; of a time of 0 no logarithm can begin."""
    measured = timed(some_rows(20), GPU.model_copy(update={"link_fraction": 0.6}))
    learned = learn(GPU.model_copy(update={"link_fraction": 1.0}), measured)
    assert learned.link_fraction == pytest.approx(0.6, rel=0.1)
    assert learn(GPU.model_copy(update={"unexplained": 0.0}), measured).unexplained > 0
    with pytest.raises(InputError, match=r"^host_us = 0: expected a number above 0 to begin with"):
        learn(GPU.model_copy(update={"host_us": 0.0}), measured)


@pytest.mark.parametrize("count", [1, 8, 32])
def test_few_rows_do_not_make_predictions_sure(count):
    """Eight parameters can follow them, so that errors that are left say little."""
    learned = learn(GPU, timed(some_rows(count), GPU))
    assert learned.unexplained == pytest.approx(GPU.unexplained * min(1.0, len(NAMES) / count) ** 0.5)


def kernels_of(gpu: Gpu, peak: float = 2.25e15) -> str:
    """What SimuMax would write of such a GPU: of each kernel the fraction of the peak that it reaches."""
    clock, reached = Clock(gpu, Parallelism(), Run(microbatches=1)), 0.9 * gpu.memory_bytes_per_s / 1e9
    ops: dict[str, dict[str, float]] = {"matmul": {}, "group_matmul": {}, "sdp_fwd": {}, "sdp_bwd": {}}
    for m, k, n in ((4096, 8192, 10240), (4096, 512, 8192), (2048, 2048, 28672)):
        ms = clock.matmul_ms(Matmul(m, n, k))
        ops["matmul"][f"b=1, m={m}, k={k}, n={n}, layout=TN"] = 2e3 * m * n * k / peak / ms
    for which, shape in (
        ("fwd", (128, 4096, 7168)),
        ("bwd_grad_act", (128, 7168, 4096)),
        ("bwd_grad_w", (7168, 4096, 128)),
    ):
        ms = clock.matmul_ms(Matmul(*shape, 64), grouped=True)
        name = f"ng=64, M=128, N=4096, K=7168, stage={which}"
        ops["group_matmul"][name] = 2e3 * 64 * 128 * 4096 * 7168 / peak / ms
    operations = 4 * 4096**2 * 64 * 128
    name = "batch=1, seq_len=4096, head_num=64, kv_head_num=8, qk_head_dim=128, v_head_dim=128"
    ops["sdp_fwd"][name] = ops["sdp_bwd"][name] = 1000 * operations / peak / clock.flash_ms(operations / 2)
    bandwidth = {"gbps": reached, "efficient_factor": gpu.memory_fraction / 0.9}
    form = {op: {"tflops": peak / 1e12, "accurate_efficient_factor": each} for op, each in ops.items()}
    rings = {"all_reduce": {"efficient_factor": gpu.link_fraction}, "p2p": {"scale": 1}}
    inside = {"bandwidth": {"gbps": gpu.link_bytes_per_s / 1e9}, "op": rings}
    machine = {"accelerator": {"op": form, "bandwidth": {"default": bandwidth}}}
    return json.dumps(machine | {"networks": {"intra_with_pcie": False, "high_intra_node": inside}})


def test_hidden_parameters_are_learned_from_kernels_by_shape():
    hidden = {"matmul_fraction": 0.6, "matmul_depth": 300.0, "attention_fraction": 0.5, "memory_fraction": 0.8}
    hidden["link_fraction"] = 0.7
    learned = calibrate(GPUS["B200"], read_kernels(kernels_of(GPUS["B200"].model_copy(update=hidden))))
    for name, value in hidden.items():
        assert getattr(learned, name) == pytest.approx(value, rel=0.02)
    assert learned.network_fraction == GPUS["B200"].network_fraction


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("{", "["),
        ("sdp_fwd", "sdp"),
        ("m=4096", "m=x"),
        ("stage=fwd", "stage=up"),
        ("tflops", "flops"),
        ("sdp_bwd", "bwd"),
        ('"all_reduce": {', '"all_reduce": [{}], "x": {'),
        (": 0.", ": -0."),
    ],
)
def test_kernels_of_another_form_are_refused_in_one_sentence(old, new):
    with pytest.raises(InputError, match=r"^kernels.*: expected") as error:
        read_kernels(kernels_of(GPUS["B200"]).replace(old, new, 1))
    assert "\n" not in str(error.value)


def test_a_gradient_says_what_an_iteration_depends_on():
    """Without a network nothing depends on it; where matmuls are all, time is their speed's inverse."""
    (row,) = rows("1,8,8,8192,64,8,1024,1,1,1,1")
    slopes = dict(zip(NAMES, gradient(lambda gpu: iteration_ms(row.on(gpu)), GPU), strict=True))
    assert slopes["network_fraction"] == slopes["link_us"] == 0
    assert -1 < slopes["matmul_fraction"] < -0.6
    assert slopes["host_us"] > 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEAD, "rows: no rows"),
        (f"{HEAD}\n8,8,1,1024,16,8,1024,2,2,4,10", "rows, line 2: # GPUs = 8: expected 2 · 2 · 4 = 16"),
        (f"{HEAD}\n16,7,1,1024,16,8,1024,2,2,4,10", "rows, line 2: global batch = 7: expected a multiple of 2 · 1"),
        (
            f"{HEAD}\n16,8,1,1024,16,8,1024,2,2,4,nan",
            "rows, line 2: iteration time .ms. = 'nan': expected a number above",
        ),
        (f"{HEAD}\n16,8,1.5,1024,16,8,1024,2,2,4,1", "rows, line 2: micro batch = '1.5': expected a whole number"),
        (f"{HEAD}\n48,8,1,1024,16,8,1024,3,4,4,1", "rows, line 2: attention heads = 16: expected a multiple of 3"),
        (f"{HEAD}\n16,8,1,1024", "rows, line 2: .* = None: expected a number above 0"),
        (f"{HEAD}\n1,1,1,1000,16,8,1024,1,1,1,1", "rows, line 2.*heads = 16: must divide hidden = 1000"),
        ("a,b\n1,2", "the column '# GPUs' is missing"),
        (f"{HEAD},# GPUs\n1,2", "the column '# GPUs' is there more than once"),
    ],
)
def test_a_wrong_row_is_one_sentence(text, said):
    with pytest.raises(InputError, match=said) as error:
        read(text)
    assert "\n" not in str(error.value)
    with pytest.raises(InputError, match=r"^rows: expected a table as CSV: field larger"):
        rows("1" * 200_000)


def test_columns_may_be_in_another_order_after_blanks_and_other_ends_of_lines():
    row = "16,8,1,1024,16,8,1024,2,2,4,10"
    turned = "\r\n".join(", ".join(line.split(",")[::-1]) for line in (HEAD, row))
    assert read(turned) == rows(row)


def test_errors_are_of_pairs_that_answer_one_question():
    """Two models; of the first one three plans, of which one is predicted on the wrong side of another."""
    every = rows(
        "8,8,1,1024,16,8,1024,1,8,1,100",
        "8,8,2,1024,16,8,1024,2,4,1,120",
        "8,8,1,1024,16,8,1024,1,1,8,122",
        "8,8,1,2048,16,8,1024,1,8,1,50",
    )
    judged = errors(every, [110.0, 108.0, 122.0, 50.0])
    assert judged.pairs == 2  # 120 and 122 are alike, 50 answers another question
    assert judged.ordered == 0.5
    assert judged.regret == judged.most_regret == pytest.approx(0.2)
    assert judged.mean == pytest.approx((0.1 + 0.1 + 0 + 0) / 4)


@pytest.mark.parametrize("wrong", [np.eye(3), np.zeros((8, 8)), np.eye(8) + np.eye(8, k=1)])
def test_a_covariance_that_is_none_is_refused(wrong):
    sentence = r"covariance: must (have 8 rows of 8 numbers|be symmetric and positive definite)"
    with pytest.raises(InputError, match=sentence):
        Gpu.from_dict(GPU.model_dump() | {"covariance": wrong.tolist()})


def test_what_a_preset_has_learned_is_surer_than_what_was_assumed():
    learned = covariance(GPUS["A100-megatron"])
    assert (np.linalg.eigvalsh(learned) > 0).all()
    assert (np.diag(learned) <= np.diag(covariance(GPU)) * 1.01).all()
    assert GPUS["A100-megatron"].flops == GPU.flops


def test_what_iterations_had_stays_beside_what_they_teach():
    small, large = (rows(f"8,64,{size},1024,16,8,1024,1,8,1,{ms}") for size, ms in ((1, 900), (8, 800)))
    learned = learn(GPU, [*large, *small])
    assert learned.measured == Extent(tokens=8 * 1024, experts=0, recompute=("full",))
    more = learn(GPUS["B200"].model_copy(update={"flops": GPU.flops}), small).measured
    assert more == Extent(tokens=16384, experts=64, recompute=("full", "none"))
    assert GPU.measured is None, "a data sheet's figures are assumed"


def test_what_no_iteration_had_is_named():
    """On H100 nothing was recomputed, at most 8192 tokens and 16 experts of a layer were on a GPU."""

    def beyond(gpu: str, size: int, recompute: Recompute, **division: int) -> list[str]:
        run = Run(microbatches=4, microbatch_size=size, recompute=recompute)
        return estimate(MODELS["qwen3-30b-a3b"], Parallelism(**division), GPUS[gpu], run).not_measured

    assert beyond("H100", 2, "none", ep=8, dp=8) == []
    assert beyond("H100", 8, "none", ep=8, dp=8, cp=4) == []
    assert beyond("H100", 4, "full", ep=4, dp=8) == [
        "full recomputation",
        "16,384 tokens of a micro-batch on a GPU, 8,192 at most",
        "32 experts on a GPU, 16 at most",
    ]
    assert beyond("A100", 4, "full", ep=4, dp=8) == []
    assert beyond("H100", 512, "none", ep=8, dp=8) == ["2,097,152 tokens of a micro-batch on a GPU, 8,192 at most"]


@pytest.mark.skipif(DATA is None, reason="OPTPIPE_ITERATIONS names no folder of vTrain's tables")
def test_measured_iterations_are_predicted():
    """The goals but for the order of plans on several nodes: docs/costs.md says what it misses."""
    for file in ("vtrain-single.csv", "vtrain-multi.csv"):
        table = read((Path(DATA or "") / file).read_text())
        made = errors(table, [iteration_ms(row.on(GPUS["A100-megatron"])) for row in table])
        assert made.mean <= 0.07
        assert made.ordered >= 0.85
        assert made.regret <= 0.03
