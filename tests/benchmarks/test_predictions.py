"""Tables of measured iterations: every row is predicted, or is named with the reason."""

import csv
from pathlib import Path
from statistics import mean

import pytest

from optpipe.transformer.estimate import estimate
from optpipe.transformer.iterations import COLUMNS, MEASURED, iteration_ms
from optpipe.transformer.presets import GPUS, MODELS
from optpipe.transformer.records import Parallelism, Run

GOLDEN = """case,family,gpu,iteration_s_median,mem_max_GB,num-layers,hidden-size,ffn-hidden-size,num-attention-heads,\
group-query-attention,num-query-groups,seq-length,micro-batch-size,global-batch-size,tensor-model-parallel-size,\
pipeline-model-parallel-size,num-layers-per-virtual-pipeline-stage,num-virtual-stages-per-pipeline-rank,\
pipeline-model-parallel-layout,context-parallel-size,expert-model-parallel-size,num-experts,moe-router-topk,mtp-num-layers,recompute-granularity,\
recompute-modules,fine-grained-activation-offloading,offload-modules,use-distributed-optimizer,transformer-impl,\
fp8-format,swiglu,vocab-size,sequence-parallel,cuda-graph-impl"""
BRIDGE = """container,section,\
System,#-GPUs,Precision,GBS,MBS,Sequence Length,TP,PP,CP,VP,EP,Tokens / sec / GPU,Model TFLOP / sec / GPU,FSDP,Model
26.04,Model: LLAMA3_70B,DGX-H100,64,FP8,256,1,8192,4,8,1,5,n/a,1600,672,0,
25.09,System: DGX-H100,,64,,128,1,8192,8,8,1,5,1,1500 (1400),630,0,LLAMA3_70B
25.09,System: DGX-H100,,64,,128,1,8192,4,8,1,5,1,1600,672,0,LLAMA3_70B
26.04,Model: Minerva_9,DGX-H100,64,FP8,512,1,8192,1,1,1,n/a,64,9000,3780,0,
26.04,Model: LLAMA3_70B,DGX-X1,64,FP8,256,1,8192,4,8,1,5,n/a,1600,672,0,
26.04,Model: LLAMA3_70B,DGX-H100,64,FP8,251,1,8192,4,8,1,5,n/a,1600,672,0,
26.06,Model: LLAMA3_70B,DGX-H100,64,FP8,256,1,8192,4,8,1,5,n/a,2400,670,0,
26.06,Model: LLAMA3_70B,DGX-H100,64,FP9,256,1,8192,4,8,1,5,n/a,1600,,0,
"""
SIMUMAX = """case,gpu,gpus,model,layers,sequence,microbatch_size,microbatches,tp,cp,ep,pp,dp,precision,step_ms,\
peak_allocated_mib_by_rank,peak_reserved_mib_by_rank
a,B200,8,llama3-70b,12,4096,1,4,1,1,1,2,4,bf16,800,60000 60000 60000 60000 50000 50000 50000 50000,\
62000 62000 62000 62000 52000 52000 52000 52000
b,B200,8,deepseekv2,4,4096,1,4,1,1,4,2,4,bf16,280,1 1 1 1 1 1 1 1,1 1 1 1 1 1 1 1
"""
MLPERF = """round,system,run,config,\
submission_platform,global_batch_size,max_sequence_length,median_s,DGXNNODES,DGXNGPU,\
TENSOR_MODEL_PARALLEL,PIPELINE_MODEL_PARALLEL,INTERLEAVED_PIPELINE,CONTEXT_PARALLEL,MICRO_BATCH_SIZE
v5,a_h100,0,config_DGXH100_64.sh,64xNVIDIA,1152,8192,55,64,,8.0,8,8,2,1
v5,b.dgxb200x8.n32,0,,32xPLACEHOLDER,576,8192,27,,,,,,,
"""


def test_every_row_is_predicted_or_named(bench, tmp_path: Path):
    head = ",".join([*COLUMNS.values(), MEASURED])
    (tmp_path / "vtrain-single.csv").write_text(
        f"{head}\n8,8,1,1024,16,8,1024,1,8,1,100\n8,8,2,1024,16,8,1024,2,4,1,120\n"
    )
    (tmp_path / "today").mkdir()
    values = dict.fromkeys(GOLDEN.split(","), "") | {"family": "gpt", "case": "g", "gpu": "a100"}
    values |= {"iteration_s_median": "1.5", "mem_max_GB": "20", "num-layers": "32", "hidden-size": "4096"}
    values |= {"num-attention-heads": "32", "seq-length": "4096", "micro-batch-size": "1", "global-batch-size": "8"}
    values |= {"tensor-model-parallel-size": "2", "pipeline-model-parallel-size": "4", "vocab-size": "32000"}
    leaving = {"fine-grained-activation-offloading": "True", "offload-modules": "mlp"}
    changed = [{"family": "nemotron"}, leaving, {"num-layers": "16"}]
    changed += [{"pipeline-model-parallel-layout": text} for text in ("Et*16|t*15mL", "Et*12|t*8|(t)*7|t*5L")]
    changed += [leaving | {"offload-modules": "[core_attn attn_proj]"}, {"case": "g_nondeterministic"}]
    changed += [{"family": "bert", "tensor-model-parallel-size": ""}, {"sequence-parallel": "True"}]
    experts = {"num-experts": "8", "moe-router-topk": "2", "tensor-model-parallel-size": "4"}
    experts |= {"pipeline-model-parallel-size": "1", "expert-model-parallel-size": "2", "case": "ep2_etp2_resume"}
    release = experts | {"global-batch-size": "128"}
    changed += [experts, release | {"case": "ep2_etp2_release"}]
    whole = release | {"case": "release", "gpu": "gb200", "expert-model-parallel-size": "32", "num-experts": "64"}
    changed += [whole, whole | {"vocab-size": ""}, whole | {"expert-model-parallel-size": "16"}]
    tests = [values, *(values | each for each in changed)]
    lines = [GOLDEN, *(",".join(each.values()) for each in tests)]
    tables = {"golden": "\n".join(lines), "bridge": BRIDGE}
    for name, text in tables.items():
        (tmp_path / "today" / f"megatron-{name}.csv").write_text(text)
    (tmp_path / "today/simumax-b200.csv").write_text(SIMUMAX)
    (tmp_path / "today/mlperf-405b.csv").write_text(MLPERF)

    ended = bench("predictions", tmp_path, "--rows", tmp_path / "out.csv")
    assert ended.code == 0
    with (tmp_path / "out.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["table"], row["row"]) for row in rows] == [
        *(("vtrain-single.csv", str(n)) for n in (2, 3)),
        *(("simumax-b200.csv", str(n)) for n in (2, 3)),
        *(("mlperf-405b.csv", str(n)) for n in (2, 3)),
        *(("megatron-bridge.csv", str(n)) for n in range(2, 10)),
        *(("megatron-golden.csv", str(n)) for n in range(2, 17)),
    ]
    refused = {(row["table"], row["row"]): row["not_predicted"] for row in rows if not row["predicted_ms"]}
    assert refused == {
        (
            "megatron-bridge.csv",
            "5",
        ): "model = Minerva_9: neither a file nor a preset, which optpipe model --presets lists",
        ("megatron-bridge.csv", "6"): "gpu = X1: neither a file nor a preset, which optpipe model --presets lists: "
        + ", ".join(GPUS),
        ("megatron-bridge.csv", "7"): "gpus = 64, batch = 251: no multiples of tp · pp · cp = 32, size = 1",
        (
            "megatron-bridge.csv",
            "9",
        ): "row: precision = 'FP9': input should be 'bf16', 'fp8', 'mxfp8', 'nvfp4' or 'fp32'",
        ("megatron-golden.csv", "3"): "family = nemotron: expected bert, gpt, moe or mixtral",
        ("megatron-golden.csv", "4"): "offload-modules = mlp: expected attn_norm, qkv_linear, core_attn, attn_proj, "
        "mlp_norm, expert_fc1, moe_act",
        ("megatron-golden.csv", "6"): "2 stages: expected as many on each of pp = 4 ranks",
    }
    peaks = {
        row["row"]: float(row["predicted_bytes"]) for row in rows if "golden" in row["table"] and row["predicted_ms"]
    }
    scores = 32 // 2 * 4096**2 * (2 + 2 + 1)  # of a layer of one micro-batch, their dropout among them
    assert peaks["2"] - peaks["9"] == pytest.approx(8 * scores, rel=0.01)  # eight layers on the last rank
    assert peaks["7"] < peaks["2"]  # five layers are there
    queries = 2 * 4096 * 4096 // 2
    assert peaks["2"] - peaks["8"] == pytest.approx((8 - 2) * 4 * queries, rel=0.01)  # queries, keys, values, outputs
    assert peaks["11"] < peaks["2"]  # what tensor parallelism leaves whole is divided
    assert peaks["13"] > peaks["12"]  # one expert of four gets twice its share, but the batch has more GPUs
    words = (256000 - 32000) // 4  # of a GPU: 18 bytes a weight, logits of 32 bits, and at most gradients of 16
    more = peaks["15"] - peaks["14"] - 18 * words * 4096
    assert 4 * words * 4096 < more <= 6 * words * 4096
    assert peaks["14"] > peaks["16"]  # 16 nodes of GB200 are 64 GPUs: 2 whole experts each, or 4 over tp 4
    assert all(f"{table}, line {row}" in ended.out for table, row in refused)
    assert "| Bridge, Hopper, dense | 6 | 4 |" in ended.out
    assert "of 1 |" in ended.out.split("Bridge, Hopper, dense")[1].splitlines()[0]  # tp 8 against tp 4
    assert "| Megatron-LM, waits for the host | 2 | 2 |" in ended.out

    run = Run(microbatches=128, sequence=8192, precision="fp8", gradient_bytes=2, overlap="all")
    division = Parallelism(tp=4, pp=8, dp=2, chunks=5, zero=1, etp=1)
    made = iteration_ms(estimate(MODELS["llama-3-70b"], division, GPUS["H100"], run))
    bridge = [row for row in rows if row["table"] == "megatron-bridge.csv"]
    assert float(bridge[0]["predicted_ms"]) == pytest.approx(made, rel=1e-5)
    adapted = iteration_ms(estimate(MODELS["llama-3-70b"], division, GPUS["H100"], run.model_copy(update={"lora": 16})))
    assert float(bridge[6]["predicted_ms"]) == pytest.approx(adapted, rel=1e-5)  # a token takes too few operations
    assert adapted < made
    assert float(bridge[0]["measured_ms"]) == pytest.approx(256 * 8192 / (64 * 1600) * 1000, rel=1e-5)
    assert float(bridge[1]["measured_ms"]) == pytest.approx(128 * 8192 / (64 * 1500) * 1000, rel=1e-5)
    ranks = rows[2]["predicted_bytes"].split()
    assert len(ranks) == 8
    assert len(set(ranks[:4])) == len(set(ranks[4:])) == 1 != len(set(ranks))
    reserved = [1.04 * float(ranks[rank]) / 2**20 / mib - 1 for rank, mib in ((0, 62000), (7, 52000))]
    shown = next(line for line in ended.out.splitlines() if line.startswith("| SimuMax, Blackwell, dense"))
    assert shown.endswith(f"| {mean(map(abs, reserved)):.1%} |")


def test_a_folder_without_tables_is_refused(bench, tmp_path: Path):
    ended = bench("predictions", tmp_path)
    assert ended.code != 0
    assert "no table of measured iterations; expected one of vtrain-single.csv" in ended.err
