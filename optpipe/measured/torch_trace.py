"""Chrome traces of `torch.profiler`, one file a rank, in which PyTorch's pipelining ran: its runtime opens a range such
as `PP:0F3` for every action (`torch.distributed.pipelining.schedules._PipelineScheduleRuntime`).

On a GPU the range on the device counts: from the first kernel that the action launched to the end of the last one. On a
CPU it is the host's, from its first operator: before that, inside the range, the host waits for the action's message.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from optpipe.errors import InputError
from optpipe.formats.torch_csv import ACTION, BY_LETTER
from optpipe.measured.op_times import Timed
from optpipe.model.ops import Op

_RANGE = re.compile(rf"PP:{ACTION.pattern}")
_PAIR = re.compile(r"PP:\(.*\)OVERLAP_F_B")
DEVICE, HOST = "gpu_user_annotation", "user_annotation"


def read(files: Sequence[tuple[str, str]]) -> tuple[list[Timed], bool]:
    """All ops of these ranks, whose files have a name and a text, and whether their times are the host's. The device of
    a rank is its place among them.

    Raises InputError that names the file, and what is wrong with it.
    """
    contents = [(path, _load(text, path)) for path, text in files]
    traces = sorted((_rank(content, n), n, path, content) for n, (path, content) in enumerate(contents))
    all_ops: list[Timed] = []
    on_host = False
    for device, (_, _, path, content) in enumerate(traces):
        try:
            ops, host = _ops(content, device, path)
        except InputError:
            raise
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InputError(f"{path}: not as torch.profiler writes it: {error}") from None
        all_ops, on_host = all_ops + ops, on_host or host
    where = {each.op.stage: each.device for each in all_ops}
    if twice := [each for each in all_ops if where[each.op.stage] != each.device]:
        here, there = (traces[device][2] for device in (twice[0].device, where[twice[0].op.stage]))
        raise InputError(
            f"stage {twice[0].op.stage} is in {here} and in {there}: the traces of one pipeline are expected"
        )
    return all_ops, on_host


def _load(text: str, path: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
        if isinstance(content["traceEvents"], list):
            return dict(content)
    except (KeyError, TypeError, ValueError, RecursionError):
        pass
    raise InputError(f"{path}: no trace of torch.profiler: JSON with traceEvents is expected")


def _rank(content: dict[str, Any], place: int) -> int:
    """The rank that the trace names; without one, ranks are in the order of their files."""
    told = content.get("distributedInfo")
    rank = told.get("rank") if isinstance(told, dict) else None
    return rank if isinstance(rank, int) else place


def _ops(content: dict[str, Any], device: int, path: str) -> tuple[list[Timed], bool]:
    events = [
        each for each in content["traceEvents"] if isinstance(each, dict) and each.get("ph") == "X" and "dur" in each
    ]
    ranges = [each for each in events if str(each.get("name", "")).startswith("PP:")]
    if pairs := [each["name"] for each in ranges if _PAIR.fullmatch(each["name"])]:
        raise InputError(
            f"{path}: {pairs[0][:40]}: a pair has one range, in which the times of its two ops cannot be told apart"
        )
    ranges = [each for each in ranges if _RANGE.fullmatch(each["name"])]
    device_ranges = [each for each in ranges if each.get("cat") == DEVICE]
    host = not device_ranges
    if host:
        device_ranges = _from_first_operator(events, [each for each in ranges if each.get("cat") == HOST])
    if not device_ranges:
        raise InputError(
            f"{path}: no range such as PP:0F3: a step by one of PyTorch's pipeline schedules is expected, profiled "
            "with ProfilerActivity.CPU, and CUDA on a GPU"
        )
    base = int(content.get("baseTimeNanoseconds", 0)) / 1e6
    ops, steps = [], defaultdict[str, int](int)
    for each in sorted(_on_main_stream(device_ranges), key=lambda each: float(each["ts"])):
        stage, letter, microbatch = _RANGE.fullmatch(each["name"]).groups()  # type: ignore[union-attr]
        op = Op(BY_LETTER[letter], int(stage), int(microbatch))
        ops.append(Timed(op, device, steps[each["name"]], each["dur"] / 1e3, base + each["ts"] / 1e3))
        steps[each["name"]] += 1
    return ops, host


def _from_first_operator(events: list[Any], ranges: list[Any]) -> list[Any]:
    """The ranges without the time before their first operator."""
    starts: dict[Any, list[float]] = defaultdict(list)
    for each in events:
        if each.get("cat") == "cpu_op":
            starts[each["tid"]].append(each["ts"])
    for times in starts.values():
        times.sort()
    shortened = []
    for each in ranges:
        times, end = starts[each["tid"]], each["ts"] + each["dur"]
        first = bisect_left(times, each["ts"])
        begin = times[first] if first < len(times) and times[first] < end else each["ts"]
        shortened.append({**each, "ts": begin, "dur": end - begin})
    return shortened


def _on_main_stream(ranges: list[Any]) -> list[Any]:
    """Those on the stream on which most of the time is spent: a range is there once for each stream that it uses."""
    spent: dict[Any, float] = defaultdict(float)
    for each in ranges:
        spent[each["tid"]] += each["dur"]
    main = max(spent, key=lambda stream: spent[stream])
    return [each for each in ranges if each["tid"] == main]
