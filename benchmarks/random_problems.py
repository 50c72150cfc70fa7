"""Random problems of every kind; the same number is always the same problem."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.problems import GB
from optpipe.model.problem import Problem

KINDS: dict[str, dict[str, Any]] = {  # what sets a kind apart, read by `random_problem`
    "stays": {},
    "leaves": {"away": (0.5, 2.0)},  # ms of a transfer, of a forward's
    "slowlink": {"away": (2.0, 5.0)},
    "parts": {"away": (1.0, 5.0), "parts": (2, 4)},
    "duplex": {"away": (1.0, 3.0), "transfer_mode": "full_duplex"},
    "shared": {"away": (0.5, 2.0), "link": True},
    "again": {"recompute": True},
    "either": {"away": (1.0, 4.0), "recompute": True},
    "uneven": {"away": (0.5, 3.0), "spread": 0.3},
    "chunks": {"chunks": 2},
    "few": {"devices": (16, 16), "memory": (0.2, 0.4)},
}


def random_problem(number: int) -> Problem:
    """The kinds by turns: 2 to 8 devices, one to four times as many micro-batches, memory for a fifth to all of the
    activations that 1F1B holds."""
    kind = list(KINDS)[number % len(KINDS)]
    has, random = KINDS[kind], np.random.default_rng(number)

    def whole(least: int, most: int) -> int:
        return int(random.integers(least, most, endpoint=True))

    devices = whole(*has.get("devices", (2, 8)))
    microbatches = int(devices * random.uniform(1, 4))
    chunks = has.get("chunks", 1)
    forward_ms, size = float(random.uniform(5, 20)), whole(1, 5) * 4 * GB
    ratios = random.uniform(0.8, 1.2), random.uniform(0.5, 1.0), random.uniform(0.2, 0.8)
    in_flight = max(1.2, devices * random.uniform(*has.get("memory", (0.2, 1.0))))
    away = forward_ms * random.uniform(*has["away"]) if "away" in has else None
    parts = whole(*has["parts"]) if "parts" in has else 1
    stages = []
    for s in range(devices * chunks):
        work = forward_ms * float(random.lognormal(0, has.get("spread", 0.0)))
        stages.append(_stage_costs(s % devices, work, ratios, size) | _relief(away, parts, size, has, work))
    return Problem.from_dict(
        {
            "name": f"{kind}-{devices}x{microbatches}-{number}",
            "microbatches": microbatches,
            "p2p_ms": round(float(random.uniform(0, 2)), 1),
            "transfer_mode": has.get("transfer_mode", "half_duplex"),
            "devices": [
                {"activation_budget_bytes": int(in_flight * size * chunks)}
                | ({"link": f"switch {d // 2}"} if "link" in has else {})
                for d in range(devices)
            ],
            "stages": stages,
        }
    )


def _stage_costs(device: int, work: float, ratios: tuple[float, float, float], size: int) -> dict[str, Any]:
    """A stage whose forward takes `work` ms; the ratios are of B and W to it, and of what is saved for W to `size`."""
    backward, weight, saved = ratios
    return {
        "device": device,
        "forward_ms": round(work, 1),
        "backward_input_ms": round(work * backward, 1),
        "backward_weight_ms": round(work * weight, 1),
        "activation_bytes": size,
        "saved_for_weight_bytes": int(saved * size),
    }


def _relief(away: float | None, parts: int, size: int, has: dict[str, Any], work: float) -> dict[str, Any]:
    """What its activation can do except stay: leave, or be computed again."""
    fields: dict[str, Any] = {}
    if away is not None:
        moved = {"offload_ms": round(away, 1), "reload_ms": round(away, 1), "offload_bytes": size}
        fields |= moved | {"offload_parts": parts}
    if "recompute" in has:
        fields |= {"recompute_ms": round(work, 1), "checkpoint_bytes": size // 10}
    return fields
