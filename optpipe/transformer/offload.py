"""What Megatron-core 0.19.2 offloads by module (`--offload-modules`): which tensors a layer's modules save.

They are TransformerEngine's, which Megatron asks for: norms are fused with the matmul behind them, but for those before
latent attention and before experts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from optpipe.errors import InputError
from optpipe.transformer.records import Run
from optpipe.transformer.work import Piece, Saved

LEAST = 2**20  # numbers of a tensor that is offloaded (`min_offloaded_tensor_size`)
NORM = "norm input"
OUTPUT, WIDE = "projection input", "attention's output"  # core attention saves either
# In the order in which modules of a layer begin: what each saves, and what its part of a layer must save to have it.
MODULES: dict[str, tuple[tuple[str, ...], str]] = {
    "attn_norm": ((NORM,), "latents' input"),
    "qkv_linear": ((NORM, "qkv input", "latents' input", "latents", "latents after their norms"), "queries"),
    "core_attn": (("queries", "keys and values", WIDE, OUTPUT), "queries"),
    "attn_proj": ((OUTPUT,), "queries"),
    "mlp_norm": ((NORM,), "experts' input"),
    "expert_fc1": (("experts' input",), "experts' input"),
    "moe_act": (("activation function's input",), "experts' input"),
}
APART = {"qkv_linear": (NORM, "latents' input"), "core_attn": (OUTPUT, WIDE)}  # the first, unless there is the second
# What of these begins and ends while another one's tensors have not left.
AROUND = {"attn_norm": ("qkv_linear", "core_attn", "attn_proj"), "mlp_norm": ("expert_fc1", "moe_act")}


class Group(NamedTuple):
    """What a module of a layer saves: the bytes that are copied, and those that this frees on the GPU."""

    module: str
    copied: float
    freed: float


def module_groups(piece: Piece, modules: Collection[str], run: Run) -> Iterator[Group]:
    """Yield what these modules of a piece save, in the order in which they begin. Raises InputError for another one."""
    if wrong := sorted({*modules} - {*MODULES}):
        raise InputError(f"offload-modules = {wrong[0]}: expected {', '.join(MODULES)}")
    for part in _parts(piece.saved) if piece.is_layer else ():
        names = {saved.name for saved in part}
        for module, (taken, needed) in MODULES.items():
            if module in modules and needed in names:
                without, where = APART.get(module, ("", ""))
                saving = [each for each in reversed(part) if each.name in taken]
                of = [each for each in saving if each.name != without or where not in names]
                copied = {each.name: _copied(each, run) for each in of}  # of experts, not of the shared one
                kept = {OUTPUT} if module == "core_attn" else set()
                yield Group(
                    module, sum(copied.values()), sum(size for name, size in copied.items() if name not in kept)
                )


def _parts(saved: Sequence[Saved]) -> list[list[Saved]]:
    """Attention, experts, others, each from its norm on."""
    parts: list[list[Saved]] = []
    for each in saved:
        parts += [[]] if each.name == NORM else []
        parts[-1].append(each)
    return parts


def _copied(saved: Saved, run: Run) -> float:
    tensors = 2 if saved.name == "keys and values" else 1
    return saved.bytes if saved.kept(run.recompute) and saved.bytes >= LEAST * run.value_bytes * tensors else 0.0
