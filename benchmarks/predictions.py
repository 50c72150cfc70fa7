"""Measured iterations of others, predicted: errors of the time, of the order of plans, and of peak memory.

What a table does not say is one assumption for all of its rows, in its reader's docstring.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from io import StringIO
from math import inf
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from benchmarks.tables import head, line, text
from optpipe.errors import InputError
from optpipe.files import read_text, write_file
from optpipe.formats import megatron
from optpipe.transformer.estimate import FRAGMENTS, Estimate, estimate
from optpipe.transformer.iterations import (
    GPT_VOCABULARY,
    Iteration,
    errors,
    padded_vocabulary,
    read_iterations,
    simulate,
)
from optpipe.transformer.offload import module_groups
from optpipe.transformer.presets import GPUS, MODELS, preset
from optpipe.transformer.records import Parallelism, Run, Transformer

COLUMNS = (
    "rows",
    "predicted",
    "mean error",
    "every third",
    "median",
    "ordered right, of pairs",
    "regret",
    "peak memory",
    "reserved",
)
WRITTEN = ("table", "row", "name", "measured_ms", "predicted_ms", "measured_bytes", "predicted_bytes", "not_predicted")
BERT_VOCABULARY = 30522
HOST = 24  # layers, below which Megatron-LM's tests are too small for a GPU
# Of a kernel, by the hosts of these tests: deterministic kernels, of TransformerEngine's modules, less where attention
# is of torch's kernels or, `local`, all is
HOST_US = {"A100": 240.0, "H100": 180.0, "GB200": 240.0, "GB200 1node": 600.0}
LOCAL, UNFUSED = 0.6, 0.8
HOT = 1.0  # more than its share that one expert of a GPU gets at the peak of a run of thousands of steps
RELEASE_VOCABULARY = 256000  # Nemotron's: what Mixtral and GPT hold at rest fits it on two GPUs, and no smaller one
PRECISIONS = {"BF16": "bf16", "NVFP4": "nvfp4", "MXFP8": "mxfp8", "FP8-MX": "mxfp8"}
PRECISIONS |= dict.fromkeys(("FP8", "FP8-CS", "FP8-SC"), "fp8")  # a scale a tensor, or a block of it
BRIDGE = {
    "llama3_8b": "llama-3-8b",
    "llama3_70b": "llama-3-70b",
    "llama31_405b": "llama-3-405b",
    "gptoss120b": "gpt-oss-120b",
    "qwen3_30b_a3b": "qwen3-30b-a3b",
    "qwen3_235b_a22b": "qwen3-235b-a22b",
    "kimi_k2": "kimi-k2",
    "nemotron_3_nano": "nemotron-3-nano",
    "nemotron_3_super": "nemotron-3-super",
    "deepseekv3": "deepseek-v3",
}
MEGATRON = {
    "tp": "tensor-model-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "cp": "context-parallel-size",
    "ep": "expert-model-parallel-size",
    "chunks": "num-virtual-stages-per-pipeline-rank",
}
# Megatron-LM's tests that fuse attention, beside those with context parallelism, which has no other.
FUSED = (
    "resume",
    "nondeterministic",
    "memory_speed",
    "release",
    "weekly",
    "fsdp",
    "experimental",
    "cudagraph",
    "fuser",
)
# Workspaces of cuBLAS and TransformerEngine, which take more from Hopper on.
WORKSPACES = {"A100": 0.08e9}
WORKSPACE = 0.11e9
LATENT = {"kv_latent": 512, "head_size": 128, "rope_size": 64, "value_size": 128}  # Megatron's defaults
CUT = {"layers": "num-layers", "experts": "num-experts", "experts_per_token": "moe-router-topk"}
Fields = Mapping[str, str]


class Held(NamedTuple):
    """What holds for the peak of memory that a test of Megatron-LM writes.

    `workspaces` are the libraries' bytes, `hot` is by how many times its share one expert of a GPU has more tokens, and
    what `modules` save waits on the host.
    """

    workspaces: float
    hot: float
    modules: Sequence[str]

    def peaks(self, estimated: Estimate) -> list[float]:
        """What each device holds at most, in bytes. Raises InputError for an unknown module."""
        load = 1.0 + self.hot * estimated.parallelism.ep / max(1, estimated.shape.experts)
        run = estimated.run.model_copy(update={"expert_load": load})
        there = Estimate(estimated.shape, estimated.parallelism, estimated.gpu, run)
        freed = [sum(group.freed for group in module_groups(piece, self.modules, run)) for piece in there.pieces]
        kept = simulate(there, freed).activation_bytes
        staying = 2 * max(freed)  # of the last layer, and of one that is back ahead of its backward
        return [size + staying + self.workspaces for size in rank_peaks(there, kept)]


class Row(NamedTuple):
    """A measured iteration: the peaks of memory of all ranks, of the last one or of none, and how it is expressed."""

    group: str
    name: str
    ms: float
    bytes: Sequence[float]
    express: Callable[[], Iteration]  # raises InputError if the cost model has no such thing
    host_us: float | None = None  # of its host, if not the preset's
    held: Held | None = None  # what is known of its memory
    reserved: Sequence[float] = ()  # by the allocator, where it is given beside the peaks


class Predicted(NamedTuple):
    """What the preset of its GPU takes, in ms and in bytes of the ranks that were measured, or why there is none."""

    row: Row
    iteration: Iteration | None = None
    ms: float = 0.0
    bytes: Sequence[float] = ()
    reason: str = ""


class Plan(NamedTuple):
    """How a row divides a model, and what it runs, as its cells say."""

    gpu: str
    gpus: str
    batch: str  # sequences
    size: str  # of a micro-batch
    sequence: str
    division: dict[str, Any]
    run: dict[str, Any]

    def iteration(self, shape: Callable[[], Transformer], ms: float) -> Iteration:
        """Raises InputError if the row misses something, or its numbers do not belong together."""
        division = {name: whole(n, name) if isinstance(n, str) else n for name, n in self.division.items()}
        ranks, size = division["tp"] * division["pp"] * division["cp"], whole(self.size, "size")
        gpus, batch = whole(self.gpus, "gpus"), whole(self.batch, "batch")
        if gpus % ranks or batch % (gpus // ranks * size):
            raise InputError(f"gpus = {gpus}, batch = {batch}: no multiples of tp · pp · cp = {ranks}, size = {size}")
        dp = gpus // ranks
        run = self.run | {"microbatch_size": size, "microbatches": batch // (dp * size)}
        run |= {"sequence": whole(self.sequence, "sequence")}
        division = {"zero": 1, "dp": dp} | division
        return Iteration(shape(), Parallelism.from_dict(division, "row"), Run.from_dict(run, "row"), ms, self.gpu)


def predictions(folder: Path, /, *, rows: Path | None = None) -> None:
    """Predict measured iterations by the presets: how far off times, the order of plans and peaks of memory are.

    Parameters
    ----------
    folder
        Folder with vTrain's two files, and those of Megatron-LM's tests, Megatron-Bridge, MLPerf and SimuMax, in it or
        in its folder `today`; those that are there are read.
    rows
        A file of CSV that is to have all rows.
    """
    paths = {name: path for name in READERS for path in (folder / "today" / name, folder / name) if path.exists()}
    if not paths:
        raise InputError(f"{folder}: no table of measured iterations; expected one of {', '.join(READERS)}")
    groups, written = dict[str, dict[int, Predicted]](), StringIO()
    table = csv.writer(written, lineterminator="\n")
    table.writerow(WRITTEN)
    for name, path in paths.items():
        for number, row in enumerate(READERS[name](read_text(path), name), 2):
            made = predict(row)
            groups.setdefault(row.group, {})[number] = made
            if made.reason:
                print(f"{name}, line {number}, {row.name}: {made.reason}")
            sizes = (" ".join(f"{each:.0f}" for each in every) for every in (row.bytes, made.bytes))
            ms = f"{made.ms:.6g}" if made.iteration else ""
            table.writerow((name, number, row.name, f"{row.ms:.6g}", ms, *sizes, made.reason))
    print("\n" + head(("table", *COLUMNS), "l" + "r" * len(COLUMNS)))
    for group, members in groups.items():
        predicted = {number: made for number, made in members.items() if made.iteration}
        print(line((group, len(members), *judged(predicted))))
    if rows:
        write_file(rows, written.getvalue())


def predict(row: Row) -> Predicted:
    """Predict a row, or say why not."""
    try:
        iteration = row.express()
        gpu = preset(GPUS, "gpu", iteration.gpu)
        estimated = iteration.on(gpu.model_copy(update={"host_us": row.host_us or gpu.host_us}))
        ms, kept = simulate(estimated)
        peaks = rank_peaks(estimated, kept) if row.held is None else row.held.peaks(estimated)
    except InputError as error:
        return Predicted(row, reason=str(error))
    ranks = len(row.bytes)
    sizes = [peaks[rank * len(peaks) // ranks] for rank in range(ranks)] if ranks > 1 else peaks[-1:] * ranks
    return Predicted(row, iteration, ms, sizes)


def rank_peaks(estimated: Estimate, kept: Sequence[float]) -> list[float]:
    """What each device holds at most, in bytes."""
    return [each.state + each.workspace + size for each, size in zip(estimated.devices, kept, strict=True)]


def judged(by_line: Mapping[int, Predicted]) -> Iterator[str]:
    """The cells of a line of the table. Of every third row the presets' parameters were not learned."""
    made = list(by_line.values())
    yield str(len(made))
    if not made:
        yield from "–" * (len(COLUMNS) - 2)
        return
    by = errors([each.iteration for each in made if each.iteration], [each.ms for each in made])
    third = [abs(each.ms / each.row.ms - 1) for number, each in by_line.items() if number % 3 == 0]
    off = [abs(ours / measured - 1) for each in made for ours, measured in zip(each.bytes, each.row.bytes, strict=True)]
    yield from (f"{by.mean:.1%}", text(mean(third) if third else None, ".1%"), f"{by.median:+.1%}")
    yield from (f"{by.ordered:.1%} of {by.pairs}", f"{by.regret:.1%}") if by.pairs else "––"
    yield text(mean(off) if off else None, ".1%")
    given = [(each.bytes, each.row.reserved) for each in made if each.row.reserved]
    held = [abs((1 + FRAGMENTS) * ours / size - 1) for each in given for ours, size in zip(*each, strict=True)]
    yield text(mean(held) if held else None, ".1%")


def vtrain(table: str, name: str) -> Iterator[Row]:
    """VIA-Research/vTrain (MICRO 2024): Megatron-LM of 2022 on A100, full recomputation, unfused attention."""
    group = f"vTrain, {'one node' if 'single' in name else 'several nodes'}"
    for row in read_iterations(table, name):
        division, run, shape = row.parallelism, row.run, row.shape
        degrees = f"tp {division.tp} dp {division.dp} pp {division.pp}"
        shown = f"{shape.layers} x {shape.hidden}, {degrees}, {run.microbatches} x {run.microbatch_size} sequences"
        yield Row(group, shown, row.measured_ms, (), partial(row._replace, gpu="A100-megatron"))


def simumax(table: str, name: str) -> Iterator[Row]:
    """MooreThreads/SimuMax, docs/b200: 32-bit gradients, ZeRO 1, fused cross-entropy, no recomputation; of a cut
    DeepSeek one layer is dense."""
    for fields in csv.DictReader(StringIO(table)):
        model = re.sub(r"^(deepseek|llama)-?(v?)", r"\1-\2", fields["model"])
        peaks, reserved = (
            [float(size) * 2**20 for size in fields[f"peak_{each}_mib_by_rank"].split()]
            for each in ("allocated", "reserved")
        )
        division = {each: fields[each] for each in ("tp", "cp", "ep", "pp")}
        cut = {"layers": whole(fields["layers"])} | ({"dense_layers": 1} if "deepseek" in model else {})
        batch = whole(fields["dp"]) * whole(fields["microbatches"]) * whole(fields["microbatch_size"])
        run = {"precision": fields["precision"], "fused_gradients": True}
        plan = Plan(
            fields["gpu"], fields["gpus"], str(batch), fields["microbatch_size"], fields["sequence"], division, run
        )
        ms = float(fields["step_ms"])
        group = grouped("SimuMax", "deepseek" in model, plan.gpu)
        express = partial(plan.iteration, partial(cut_model, model, cut), ms)
        yield Row(group, fields["case"], ms, peaks, express, reserved=reserved)


def mlperf(table: str, name: str) -> Iterator[Row]:
    """MLPerf Training, Llama 3.1 405B by NeMo: FP8, gradients of 16 bits, ZeRO 1, nothing recomputed. A row without its
    configuration has tp 4, pp 8, 8 chunks and cp 2, as the others with 64 GPUs a replica have."""
    columns = {"tp": "TENSOR_MODEL_PARALLEL", "pp": "PIPELINE_MODEL_PARALLEL", "cp": "CONTEXT_PARALLEL"}
    columns["chunks"], usual = "INTERLEAVED_PIPELINE", {"tp": "4", "pp": "8", "cp": "2", "chunks": "8"}
    for fields in csv.DictReader(StringIO(table)):
        system = fields["system"]
        gpu = re.search(r"G?[BH][123]00", f"{system} {fields['config']} {fields['submission_platform']}".upper())
        nodes = fields["DGXNNODES"] or fields["submission_platform"].split("x")[0]
        gpus = str(whole(nodes) * whole(fields["DGXNGPU"] or "8"))
        division = {each: fields[column] or usual[each] for each, column in columns.items()}
        run = {"precision": "fp8", "gradient_bytes": 2, "overlap": "all"}
        batch, size = fields["global_batch_size"], fields["MICRO_BATCH_SIZE"] or "1"
        plan = Plan(gpu[0] if gpu else system, gpus, batch, size, fields["max_sequence_length"], division, run)
        ms = 1000 * float(fields["median_s"])
        shape = partial(cut_model, "llama-3-405b", {})
        group = grouped("MLPerf", False, plan.gpu)
        yield Row(group, f"{system} {fields['run']}", ms, (), partial(plan.iteration, shape, ms))


def bridge(table: str, name: str) -> Iterator[Row]:
    """NVIDIA-NeMo/Megatron-Bridge's performance summary: gradients of 16 bits, ZeRO 1, or ZeRO 3 with FSDP; nothing
    recomputed, experts not divided, from container 26.06 on fused in MXFP8 but for Nemotron's; a multi-token prediction
    module in DeepSeek unless its name says without, two in Nemotron 3 Super; where a token takes too few operations,
    LoRA of rank 16; of two precisions in a cell the first, else FP8."""
    for fields in csv.DictReader(StringIO(table)):
        model, gpu = fields["Model"] or fields["section"].removeprefix("Model: "), fields["System"]
        gpu = (gpu or fields["section"]).split("-")[-1]
        precision = fields["Precision"].split(" ")[0].upper() or "FP8"
        division = {each: re.sub("n/a", "1", fields[each.upper()]) for each in ("tp", "pp", "cp", "ep")}
        division |= {"chunks": re.sub("n/a", "1", fields["VP"]), "zero": "3" if whole(fields["FSDP"] or "0") else "1"}
        division |= {"etp": "1"}
        run = {
            "precision": PRECISIONS.get(precision, precision),
            "gradient_bytes": 2,
            "overlap": "all",
            "dispatch": "once",
            "fused_gradients": True,
            "fused_experts": precision == "MXFP8" and fields["container"] >= "26.06" and "Nemotron" not in model,
            "mtp": 2 * ("Super" in model) + (model.startswith("DeepSeek") and "w/o MTP" not in model),
        }
        plan = Plan(gpu, fields["#-GPUs"], fields["GBS"], fields["MBS"], fields["Sequence Length"], division, run)
        speed = float(fields["Tokens / sec / GPU"].split(" ")[0])
        ms = 1000 * whole(plan.batch) * whole(plan.sequence) / (speed * whole(plan.gpus))
        flops = re.match(r"[\d.]+", fields["Model TFLOP / sec / GPU"])
        operations = 1e12 * float(flops[0]) / speed if flops else inf
        preset_name = BRIDGE.get(re.sub(r"\(.*|\W", "", model).lower(), model)
        shape = partial(cut_model, preset_name, {})
        if fewer_operations(preset_name, operations):
            run["lora"] = 16
        shown = f"{fields['container']} {model}, {gpu} x {plan.gpus}, {fields['Precision']}"
        group = grouped("Bridge", "LLAMA" not in model, gpu)
        yield Row(group, shown, ms, (), partial(plan.iteration, shape, ms))


def golden(table: str, name: str) -> Iterator[Row]:
    """NVIDIA/Megatron-LM's functional tests: GPTs with learned positions, tied matrices and 32-bit gradients, on 8
    GPUs, `1node` of GB200 on 4; the last rank's peak. A `release` has 16 nodes, its proxies 8, of GB200 with 4 GPUs
    each, one vocabulary, and at the peak a fuller expert; experts are whole where tp · ep · pp would be too many GPUs.
    Attention is unfused in local modules, and where it must be deterministic from the first step on: scores are in the
    peaks of these tests, not of those that resume. A proxy of DeepSeek-V3 and Nemotron 3 Super are their presets, cut.
    """
    for fields in csv.DictReader(StringIO(table)):
        case, gpu = fields["case"], fields["gpu"].upper()
        ms, kind = 1000 * float(fields["iteration_s_median"]), "MoE" if fields["num-experts"] else "dense"
        large = float(fields["num-layers"] or "0") >= HOST and fields["family"] != "bert"
        group = f"Megatron-LM, {kind}" if large else "Megatron-LM, waits for the host"
        peak = [float(fields["mem_max_GB"]) * 1e9] if fields["mem_max_GB"] else []
        host_us = None
        if not large and gpu in HOST_US:
            own = HOST_US.get(f"{gpu} 1node") if case.endswith("1node") and not fields["cuda-graph-impl"] else None
            slower = LOCAL if fields["transformer-impl"] == "local" else UNFUSED if is_unfused(fields) else 1.0
            host_us = (own or HOST_US[gpu]) * slower
        leaving = re.findall(r"\w+", fields["offload-modules"]) if fields["fine-grained-activation-offloading"] else ()
        held = Held(WORKSPACES.get(gpu, WORKSPACE), HOT * ("release" in case), leaving)
        yield Row(group, f"{case} {gpu}", ms, peak, partial(golden_iteration, fields, gpu, ms), host_us, held)


def golden_iteration(fields: Fields, gpu: str, ms: float) -> Iteration:
    """The iteration of one of Megatron-LM's tests. Raises InputError if a cell is empty or is not modelled."""
    case, node = fields["case"], 4 if gpu == "GB200" else 8
    gpus = str(node * (8 if "proxy" in case else 16) if "release" in case else node if case.endswith("1node") else 8)
    division: dict[str, Any] = {each: fields[column] or "1" for each, column in MEGATRON.items()}
    division |= {"zero": "1" if fields["use-distributed-optimizer"] else "0"}
    division |= {"sequence_parallel": bool(fields["sequence-parallel"])}
    pp = whole(division["pp"])
    if fields["num-experts"] and (parts := re.search(r"etp(\d)", case)):
        division["etp"] = parts[1]
    elif whole(division["tp"]) * whole(division["ep"]) * pp > whole(gpus):
        division["etp"] = "1"
    if each := fields["num-layers-per-virtual-pipeline-stage"]:
        division["chunks"] = str(whole(fields["num-layers"]) // pp // whole(each))
    if each := fields["pipeline-model-parallel-layout"]:
        layers, _ = megatron.read_stages({"layout": each}, pp)
        division |= {"layers": layers, "chunks": str(len(layers) // pp)}
    run: dict[str, Any] = {"recompute": recomputed(fields), "attention": "unfused" if is_unfused(fields) else "flash"}
    run |= {"precision": "fp8" if fields["fp8-format"] else "bf16", "fused_gradients": True}
    run |= {"dispatch": "once" if "flex" in case else "alltoall", "mtp": whole(fields["mtp-num-layers"] or "0")}
    batch, size, sequence = (fields[each] for each in ("global-batch-size", "micro-batch-size", "seq-length"))
    return Plan(gpu, gpus, batch, size, sequence, division, run).iteration(partial(megatron_shape, fields), ms)


def is_unfused(fields: Fields) -> bool:
    """Whether attention's scores are computed and kept."""
    divided = fields["context-parallel-size"] not in ("", "1")
    return fields["transformer-impl"] == "local" or not (divided or any(word in fields["case"] for word in FUSED))


def recomputed(fields: Fields) -> str:
    """The level that is nearest to Megatron-LM's flags."""
    modules = fields["recompute-modules"]
    if fields["recompute-granularity"] != "selective":
        return fields["recompute-granularity"] or "none"
    return "cheap" if "layernorm" in modules or "act" in modules else "selective"


def megatron_shape(fields: Fields) -> Transformer:
    """The model of one of Megatron-LM's tests. Raises InputError if it is none that the cost model has."""
    if fields["case"].startswith("deepseekv3_proxy"):
        cut = {name: whole(fields[of]) for name, of in CUT.items()}
        return cut_model("deepseek-v3", cut | {"vocabulary": RELEASE_VOCABULARY})
    if fields["case"].startswith("nemotron3_super"):
        return cut_model("nemotron-3-super", {})
    if fields["family"] not in ("bert", "gpt", "moe", "mixtral"):
        raise InputError(f"family = {fields['family']}: expected bert, gpt, moe or mixtral")
    hidden, tp = whole(fields["hidden-size"]), whole(fields["tensor-model-parallel-size"] or "1")
    gated = fields["swiglu"]
    ffn = whole(fields["ffn-hidden-size"] or str(int(hidden * 8 / 3 / 64) * 64 if gated else 4 * hidden))
    shape = {"layers": whole(fields["num-layers"]), "hidden": hidden, "ffn": ffn, "gated": bool(gated), "tied": True}
    usual = RELEASE_VOCABULARY if "release" in fields["case"] else GPT_VOCABULARY
    usual = BERT_VOCABULARY if fields["family"] == "bert" else usual
    vocabulary = padded_vocabulary(whole(fields["vocab-size"] or str(usual)), tp)
    shape |= {"heads": whole(fields["num-attention-heads"]), "vocabulary": vocabulary, "dropout": True}
    shape |= {"causal": fields["family"] != "bert"}
    if "mla" in fields["case"] + fields["recompute-modules"]:
        shape |= LATENT
    if fields["group-query-attention"]:
        shape["query_groups"] = whole(fields["num-query-groups"])
    if fields["num-experts"]:
        shape |= {"experts": whole(fields["num-experts"]), "experts_per_token": whole(fields["moe-router-topk"] or "2")}
        shape["expert_ffn"] = ffn
    return Transformer.from_dict(shape | {"positions": whole(fields["seq-length"])}, fields["case"])


def cut_model(name: str, cut: dict[str, int]) -> Transformer:
    """A preset with other layers. Raises InputError if there is none of this name."""
    return preset(MODELS, "model", name).model_copy(update=cut)


def fewer_operations(name: str, operations: float) -> bool:
    """Whether a token takes fewer operations than training this dense model: not all weights are trained."""
    shape = MODELS.get(name)
    if shape is None or shape.experts:
        return False
    return operations < 0.8 * 6 * estimate(shape, Parallelism(), GPUS["H100"], Run(microbatches=1)).parameters


def grouped(table: str, has_experts: bool, gpu: str) -> str:
    """The line of the table that a row belongs to."""
    age = "Hopper" if gpu in ("H100", "H200") else "Blackwell"
    return f"{table}, {age}, {'MoE' if has_experts else 'dense'}"


def whole(word: str, name: str = "a cell") -> int:
    """The whole number of a cell. Raises InputError if it has none."""
    try:
        number = float(word)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e12 or number != int(number):
        raise InputError(f"{name} = {word!r}: expected a whole number")
    return int(number)


READERS: dict[str, Callable[[str, str], Iterator[Row]]] = {
    "vtrain-single.csv": vtrain,
    "vtrain-multi.csv": vtrain,
    "simumax-b200.csv": simumax,
    "mlperf-405b.csv": mlperf,
    "megatron-bridge.csv": bridge,
    "megatron-golden.csv": golden,
}
