"""What AMD's Primus writes with `dump_pp_data`: a folder with `config.json` and one `pp_rank_N.json` a rank.

A rank's file has, by iteration, lists of starts and ends in ms since the iteration began on this rank: `fwd_start`,
`fwd_end`, `bwd_start`, `bwd_end`, and `wgrad_start`, `wgrad_end` where W is apart. Beside them stand lists of
micro-batches and chunks if Primus's own schedules ran. Without these, Megatron's order is meant: micro-batches one
after the other or, with several chunks, in groups of as many as there are devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from optpipe.errors import InputError
from optpipe.measured.op_times import Timed, read_json, require_sizes, stage_of
from optpipe.model.ops import Kind, Op


def read(files: Mapping[str, str], shape: str = "looped") -> list[Timed]:
    """All ops of all iterations, of files by their names. Raises InputError that names the file and what is wrong with
    it."""
    named = {name.replace("\\", "/").rpartition("/")[2]: name for name in files}

    def content(name: str) -> Any:
        if name not in named:
            raise InputError(f"{name} is missing: all files that dump_pp_data writes are expected")
        return read_json(files[named[name]], named[name])

    config = content("config.json")
    try:
        devices, microbatches = int(config["pp_size"]), int(config["num_mbs"])
        chunks = int(config["vp_size"])
        require_sizes(devices * chunks, devices, microbatches)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{named['config.json']}: pp_size, vp_size and num_mbs are expected: {error}") from None
    ops: list[Timed] = []
    for device in range(devices):
        name = f"pp_rank_{device}.json"
        steps = content(name)
        try:
            for step, lists in sorted((int(number), lists) for number, lists in steps.items()):
                ops += _iteration(lists, device, step, (devices, chunks, microbatches), shape)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise InputError(f"{named[name]}: not as dump_pp_data writes it: {str(error)[:200]}") from None
    return ops


def _iteration(
    lists: dict[str, Any], device: int, step: int, sizes: tuple[int, int, int], shape: str
) -> Iterator[Timed]:
    devices, chunks, microbatches = sizes
    apart = bool(lists.get("wgrad_start"))
    if set(lists["fwd_start"]) & set(lists["bwd_start"]):
        raise ValueError(f"iteration {step} has a forward and a backward that run as one, so neither has a time")
    for name, kind in (("fwd", Kind.F), ("bwd", Kind.B if apart else Kind.BW), ("wgrad", Kind.W)):
        starts, ends = lists.get(f"{name}_start", []), lists.get(f"{name}_end", [])
        if len(starts) not in ((chunks * microbatches,) if name != "wgrad" or apart else (0,)):
            raise ValueError(f"iteration {step} has {len(starts)} of {name}_start, not {chunks * microbatches}")
        numbers = lists.get(f"{name}_minibatch") or [_in_order(n, devices, chunks)[0] for n in range(len(starts))]
        parts = lists.get(f"{name}_chunk") or [
            _in_order(n, devices, chunks)[1] if kind is Kind.F else chunks - 1 - _in_order(n, devices, chunks)[1]
            for n in range(len(starts))
        ]
        for start, end, number, chunk in zip(starts, ends, numbers, parts, strict=True):
            if not (0 <= int(number) < microbatches and 0 <= int(chunk) < chunks):
                raise ValueError(
                    f"iteration {step} has {name} of micro-batch {number} and chunk {chunk}: "
                    f"{microbatches} and {chunks} are numbered from 0"
                )
            op = Op(kind, stage_of(device, int(chunk), devices, shape), int(number))
            yield Timed(op, device, step, float(end) - float(start), float(start))


def _in_order(n: int, devices: int, chunks: int) -> tuple[int, int]:
    """Micro-batch and chunk of a rank's n-th forward, in Megatron's order."""
    if chunks == 1:
        return n, 0
    group, within = divmod(n, devices * chunks)
    chunk, number = divmod(within, devices)
    return group * devices + number, chunk
