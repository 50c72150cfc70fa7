"""Models of the papers and current ones, and GPUs by their data sheets: each figure with its source.

Peaks are dense; fp32 is in TF32. `memory_bytes` is the total capacity that torch reports, less than is sold: 79.15 GiB
of A100, 79.1 of H100, 139.8 of H200, 178.35 of B200, 191.69 of MI300X. PipeOffload, Figure 1: 220 of 312 TFLOP/s on
A100, and 15 GB/s each way of a PCIe 4 link that two GPUs share. FlashAttention-2 (Dao 2023), section 4.1: up to 73 % in
F on A100, up to 63 % in B; FlashAttention-3 (Shah et al. 2024): up to 75 % on H100. The other fractions are
assumptions, which `gpu.PARAMETERS` says how far to trust: `optpipe calibrate` measures them, or learns them from
measured iterations.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any, TypeVar

from optpipe.errors import InputError, did_you_mean
from optpipe.transformer.gpu import Gpu
from optpipe.transformer.records import Transformer

T = TypeVar("T")


def read_data(name: str) -> dict[str, Any]:
    """What a file of this package has."""
    content: dict[str, Any] = json.loads(resources.files("optpipe.transformer").joinpath(name).read_text("utf-8"))
    return content


MODELS = {
    name: Transformer.from_dict({"name": name} | fields, name) for name, fields in read_data("models.json").items()
}

_SHEETS = read_data("gpus.json")
# What 113 of vTrain's iterations say of Megatron-LM of 2022 on A100, by `optpipe calibrate --gpu A100-800G --from`.
_SHEETS["A100-megatron"] = _SHEETS["A100-800G"] | read_data("a100_megatron.json") | _SHEETS["A100-megatron"]
GPUS = {name: Gpu.from_dict({"name": name} | sheet, name) for name, sheet in _SHEETS.items()}


def preset(presets: Mapping[str, T], kind: str, name: str) -> T:
    """The preset of this name; case does not matter. Raises InputError with near names, of GPUs with all."""
    by_lower_case = {each.lower(): each for each in presets}
    if name.lower() not in by_lower_case:
        near = f": {', '.join(presets)}" if kind == "gpu" else did_you_mean(name.lower(), by_lower_case, "; ")
        raise InputError(f"{kind} = {name}: neither a file nor a preset, which optpipe model --presets lists{near}")
    return presets[by_lower_case[name.lower()]]
