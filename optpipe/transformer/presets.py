"""Models of the papers and current ones, and GPUs by their data sheets: each figure with its source."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any, TypeVar

from optpipe.errors import InputError, did_you_mean
from optpipe.transformer.records import Gpu, Transformer

T = TypeVar("T")
GIB = 2**30  # what vendors call GB of GPU memory; drivers show a little less
TFLOPS, GBPS = 1e12, 1e9

PIPEOFFLOAD = "PipeOffload (Wan et al. 2025), Table 2; MLP width 4h and GPT's vocabulary of 50,257 are not said"
OPTPIPE = (
    "OptPipe, appendix B, Table 2, whose sizes contradict its parameter counts; the reading with MLP width 4096, 16 "
    "heads and 8 groups that comes nearest to the counts, which grow with the number of GPUs; vocabulary of GPT-2, tied"
)


def _gpt(name: str, layers: int, hidden: int, heads: int, source: str, **more: int) -> Transformer:
    return Transformer.from_dict(
        {"name": name, "layers": layers, "hidden": hidden, "heads": heads, "ffn": 4 * hidden, "vocabulary": 50257}
        | {"sequence": 2048, "dropout": True, "source": source}
        | more,
        name,
    )


def _gated(name: str, sizes: tuple[int, ...], sequence: int, source: str, **more: int) -> Transformer:
    keys = ("layers", "hidden", "ffn", "heads", "query_groups", "vocabulary")
    fields = dict(zip(keys, sizes, strict=True)) | {"name": name, "sequence": sequence, "source": source, "gated": True}
    return Transformer.from_dict(fields | more, name)


def _optpipe(name: str, layers: int, hidden: int) -> Transformer:
    return _gpt(name, layers, hidden, 16, OPTPIPE, ffn=4096, query_groups=8, sequence=1024, tied=True)


def _pipeoffload(name: str, layers: int, hidden: int, heads: int) -> Transformer:
    return _gpt(name, layers, hidden, heads, PIPEOFFLOAD, query_groups=8, tied=True)


MODELS: dict[str, Transformer] = {
    model.name: model
    for model in (
        _optpipe("optpipe-1.5b", 128, 1024),
        _optpipe("optpipe-3.6b", 128, 2048),
        _optpipe("optpipe-7.1b", 256, 2048),
        _optpipe("optpipe-14.2b", 512, 2048),
        _pipeoffload("pipeoffload-5.8b", 32, 4096, 32),
        _pipeoffload("pipeoffload-10.5b", 38, 5120, 40),
        _pipeoffload("pipeoffload-18.1b", 46, 6144, 48),
        _pipeoffload("pipeoffload-42.9b", 62, 8192, 64),
        _pipeoffload("pipeoffload-66.6b", 62, 10240, 80),
        _pipeoffload("pipeoffload-83.8b", 78, 10240, 80),
        _gpt(
            "gpt-3-13b", 40, 5120, 40, "GPT-3 (Brown et al. 2020), Table 2.1, hidden 5140 read as 5120", positions=2048
        ),
        _gpt("gpt-3-175b", 96, 12288, 96, "GPT-3 (Brown et al. 2020), Table 2.1", positions=2048, tied=True),
        _gpt(
            "opt-66b",
            *(64, 9216, 72),
            source="OPT (Zhang et al. 2022), Table 1; vocabulary of its config.json",
            vocabulary=50272,
            positions=2050,
            tied=True,
        ),
        _gated(
            "palm-62b",
            (64, 8192, 32768, 32, 1, 256000),
            sequence=2048,
            source="PaLM (Chowdhery et al. 2022), Table 1, section 2",
            head_size=256,
            tied=True,
        ),
        _gated("llama-2-7b", (32, 4096, 11008, 32, 32, 32000), 4096, "Llama 2 (Touvron et al. 2023); config.json"),
        _gated("llama-2-70b", (80, 8192, 28672, 64, 8, 32000), 4096, "Llama 2 (Touvron et al. 2023); config.json"),
        _gated("llama-3-8b", (32, 4096, 14336, 32, 8, 128256), 8192, "Llama 3 (Dubey et al. 2024), Table 3"),
        _gated("llama-3-70b", (80, 8192, 28672, 64, 8, 128256), 8192, "Llama 3 (Dubey et al. 2024), Table 3"),
        _gated("llama-3-405b", (126, 16384, 53248, 128, 8, 128256), 8192, "Llama 3 (Dubey et al. 2024), Table 3"),
        _gated(
            "qwen2.5-32b", (64, 5120, 27648, 40, 8, 152064), 4096, "Qwen2.5 (Yang et al. 2024), Table 1; config.json"
        ),
        _gated(
            "mixtral-8x7b",
            (32, 4096, 14336, 32, 8, 32000),
            sequence=4096,
            source="Mixtral (Jiang et al. 2024), Table 1",
            experts=8,
            experts_per_token=2,
            expert_ffn=14336,
        ),
        _gated(
            "deepseek-v2-lite",
            (27, 2048, 10944, 16, 16, 102400),
            sequence=4096,
            source="DeepSeek-V2 (2024), appendix B; config.json",
            kv_latent=512,
            head_size=128,
            rope_size=64,
            value_size=128,
            dense_layers=1,
            experts=64,
            experts_per_token=6,
            expert_ffn=1408,
            shared_ffn=2816,
        ),
        _gated(
            "deepseek-v3",
            (61, 7168, 18432, 128, 128, 129280),
            sequence=4096,
            source="DeepSeek-V3 (2024), section 4.2, without the module that predicts a second token; config.json",
            kv_latent=512,
            query_latent=1536,
            head_size=128,
            rope_size=64,
            value_size=128,
            experts=256,
            experts_per_token=8,
            expert_ffn=2048,
            shared_ffn=2048,
            dense_layers=3,
        ),
        _gated(
            "qwen3-30b-a3b",
            (48, 2048, 6144, 32, 4, 151936),
            sequence=4096,
            source="Qwen3 (Yang et al. 2025); config.json",
            head_size=128,
            experts=128,
            experts_per_token=8,
            expert_ffn=768,
        ),
    )
}

_HOPPER = {"bf16": 989.4 * TFLOPS, "fp8": 1978.9 * TFLOPS, "fp32": 494.7 * TFLOPS}  # dense; fp32 in TF32
# Fractions. PipeOffload, Figure 1: 220 of 312 TFLOP/s on A100, and 15 GB/s each way of a PCIe 4 link that two GPUs
# share. FlashAttention-2 (Dao 2023), section 4.1: up to 73 % in F on A100, up to 63 % in B; FlashAttention-3 (Shah
# et al. 2024): up to 75 % on H100. The others are assumptions, which `records.PARAMETERS` says how far to trust:
# `optpipe calibrate` measures them, or learns them from measured iterations.
_ASSUMED = {
    "matmul_depth": 128.0,
    "memory_fraction": 0.8,
    "link_fraction": 0.75,
    "network_fraction": 0.75,
    "host_fraction": 0.8,
    "host_us": 20.0,
    "link_us": 5.0,
    "reserved_bytes": 4 * GIB,
}
_HOPPER_FRACTIONS = _ASSUMED | {"matmul_fraction": 0.65, "attention_fraction": 0.55}

_A100: dict[str, Any] = {
    "source": "NVIDIA A100 80GB SXM data sheet; DGX A100: 200 Gb/s a GPU; PipeOffload, figure 17: shared PCIe",
    "memory_bytes": 80 * GIB,
    "flops": {"bf16": 312 * TFLOPS, "fp32": 156 * TFLOPS},
    "memory_bytes_per_s": 2039 * GBPS,
    "link_bytes_per_s": 300 * GBPS,
    "network_bytes_per_s": 25 * GBPS,
    "host_bytes_per_s": 32 * GBPS,
    "gpus_per_host_link": 2,
    **_ASSUMED,
    "host_fraction": 0.94,
    "matmul_fraction": 0.7,
    "attention_fraction": 0.6,
}

_A100_800G = _A100 | {
    "source": "as A100, in nodes of 8 that share 800 Gb/s to other nodes (vTrain, Bang et al., MICRO 2024)",
    "network_bytes_per_s": 12.5 * GBPS,
}
# What 60 iterations say of Megatron-LM of 2022 on A100. `python -m benchmarks predictions FOLDER -o` writes it again.
_LEARNED: dict[str, Any] = json.loads(
    resources.files("optpipe.transformer").joinpath("a100_megatron.json").read_text(encoding="utf-8")
)

GPUS: dict[str, Gpu] = {
    name: Gpu.from_dict({"name": name} | sheet, name)
    for name, sheet in {
        "A100": _A100,
        "A100-800G": _A100_800G,
        "A100-megatron": _A100_800G
        | _LEARNED
        | {"source": "as A100-800G; learned from 60 of vTrain's iterations (python -m benchmarks predictions)"},
        "H100": {
            "source": "NVIDIA H100 SXM data sheet (half of the figures with sparsity); DGX H100: 400 Gb/s a GPU",
            "memory_bytes": 80 * GIB,
            "flops": _HOPPER,
            "memory_bytes_per_s": 3350 * GBPS,
            "link_bytes_per_s": 450 * GBPS,
            "network_bytes_per_s": 50 * GBPS,
            "host_bytes_per_s": 64 * GBPS,
            **_HOPPER_FRACTIONS,
        },
        "H200": {
            "source": "NVIDIA H200 SXM data sheet (half of the figures with sparsity); DGX H200: 400 Gb/s a GPU",
            "memory_bytes": 141 * GIB,
            "flops": _HOPPER,
            "memory_bytes_per_s": 4800 * GBPS,
            "link_bytes_per_s": 450 * GBPS,
            "network_bytes_per_s": 50 * GBPS,
            "host_bytes_per_s": 64 * GBPS,
            **_HOPPER_FRACTIONS,
        },
        "B200": {
            "source": "NVIDIA DGX B200 data sheet, an eighth of it; 400 Gb/s a GPU, PCIe 5; fractions as for H100",
            "memory_bytes": 180 * GIB,
            "flops": {"bf16": 2250 * TFLOPS, "fp8": 4500 * TFLOPS, "fp32": 1100 * TFLOPS},
            "memory_bytes_per_s": 8000 * GBPS,
            "link_bytes_per_s": 900 * GBPS,
            "network_bytes_per_s": 50 * GBPS,
            "host_bytes_per_s": 64 * GBPS,
            **_HOPPER_FRACTIONS,
        },
        "MI300X": {
            "source": "AMD Instinct MI300X data sheet; seven links of 64 GB/s; network and fractions are assumptions",
            "memory_bytes": 192 * GIB,
            "flops": {"bf16": 1307.4 * TFLOPS, "fp8": 2614.9 * TFLOPS, "fp32": 653.7 * TFLOPS},
            "memory_bytes_per_s": 5300 * GBPS,
            "link_bytes_per_s": 448 * GBPS,
            "network_bytes_per_s": 50 * GBPS,
            "host_bytes_per_s": 64 * GBPS,
            **_ASSUMED,
            "matmul_fraction": 0.5,
            "attention_fraction": 0.4,
        },
    }.items()
}


def preset(presets: Mapping[str, T], kind: str, name: str) -> T:
    """The preset of this name; case does not matter. Raises InputError if there is none."""
    by_lower_case = {each.lower(): each for each in presets}
    if name.lower() not in by_lower_case:
        near = did_you_mean(name.lower(), by_lower_case, "; ")
        raise InputError(f"{kind} = {name}: neither a file nor a preset, which optpipe model --presets lists{near}")
    return presets[by_lower_case[name.lower()]]
