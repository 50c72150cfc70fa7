"""What AMD's Primus writes with `dump_pp_data`: a folder with `config.json` and one `pp_rank_N.json` a rank.

A rank's file has, by iteration, lists of starts and ends in ms since the iteration began on this rank: `fwd_start`,
`fwd_end`, `bwd_start`, `bwd_end`, and `wgrad_start`, `wgrad_end` where W is apart. Beside them stand lists of
micro-batches and chunks if Primus's own schedules ran. Without these, Megatron's order is meant: micro-batches one
after the other or, with several chunks, in groups of as many as there are devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from optpipe.errors import InputError
from optpipe.files import parse_json
from optpipe.measured.events import read_pieces
from optpipe.measured.messages import impossible
from optpipe.measured.recording import ChunkOp, MeasuredOp, Recording, RunFacts, Sample, require_sizes
from optpipe.measured.steps import divided_by_step
from optpipe.model.ops import Kind
from optpipe.model.placement import SHAPES


class Sizes(NamedTuple):
    """The run, by `config.json`."""

    devices: int
    chunks: int
    microbatches: int


class Primus:
    """Reads the folder of a dump. Its `InputError` names the file and what is wrong with it, or the shape in which
    the chunks cannot lie."""

    name = "primus"
    takes = ("shape",)

    def recognize(self, sample: Sample) -> bool:
        return sample.path.name == "config.json" or any(name.startswith("pp_rank_") for name in sample.names)

    def read(self, paths: Sequence[Path], facts: RunFacts) -> Recording:
        folders = {path if path.is_dir() else path.parent for path in paths}
        folder = folders.pop()
        if folders or not (paths[0].is_dir() or (folder / "config.json").is_file()):
            raise InputError(f"{paths[0]}: the folder that dump_pp_data writes is expected")
        config = _content(folder / "config.json")
        try:
            sizes = Sizes(int(config["pp_size"]), int(config["vp_size"]), int(config["num_mbs"]))
            require_sizes(sizes.devices * sizes.chunks, sizes.devices, sizes.microbatches)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InputError(f"{folder / 'config.json'}: pp_size, vp_size and num_mbs are expected: {error}") from None
        ops: list[ChunkOp] = []
        unused: tuple[str, ...] = ()
        numbered = False
        for rank in range(sizes.devices):
            path = folder / f"pp_rank_{rank}.json"
            steps = _content(path)
            try:
                for step, lists in sorted((int(number), lists) for number, lists in steps.items()):
                    ops += _iteration(lists, rank, step, sizes)
                    numbered = numbered or bool(lists.get("fwd_chunk"))
                    if "memory" in lists and not unused:
                        memory = f"{lists['memory']!s:.20}"
                        unused = (f"the memory of an iteration ({memory}): it is that of the whole GPU",)
            except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
                raise InputError(f"{path}: not as dump_pp_data writes it: {str(error)[:200]}") from None
        # Without numbers the order is Megatron's own, whose chunks lie looped.
        recording = _place(ops, sizes, facts.shape or (None if numbered else "looped"))
        return recording._replace(unused=unused + recording.unused)


def _content(path: Path) -> Any:
    if not path.is_file():
        raise InputError(f"{path.name} is missing: all files that dump_pp_data writes are expected")
    return parse_json("".join(read_pieces(path)), str(path))


def _place(ops: Sequence[ChunkOp], sizes: Sizes, shape: str | None) -> Recording:
    """The ops on their stages; without a shape, on those that wait for each other."""
    placed: dict[str, list[MeasuredOp]] = {name: [op.on_stage(sizes.devices, name) for op in ops] for name in SHAPES}
    if sizes.chunks == 1:
        return Recording(placed["looped"])
    wrong: dict[str, str | None] = {name: impossible(list(divided_by_step(placed[name]).values())) for name in SHAPES}
    fitting = [name for name in SHAPES if wrong[name] is None]
    if shape is None:
        if not fitting:
            raise InputError(
                f"shape is missing: by their times, chunks lie neither looped ({wrong['looped']}) nor in a v "
                f"({wrong['v']})"
            )
        sentences = [f"the looped placement: {wrong['looped']}, so the chunks lie in a v"] if fitting == ["v"] else []
        return Recording(placed[fitting[0]], tuple(sentences))
    if wrong[shape] and fitting:
        raise InputError(f"shape = {shape!r}: {wrong[shape]}; by their times the chunks lie in the shape {fitting[0]}")
    return Recording(placed[shape])


def _iteration(lists: dict[str, Any], rank: int, step: int, sizes: Sizes) -> Iterator[ChunkOp]:
    """The ops of a rank in an iteration; fewer than a step has in an evaluation, and where the dump was cut off."""
    apart = bool(lists.get("wgrad_start"))
    if set(lists["fwd_start"]) & set(lists["bwd_start"]):
        raise ValueError(f"iteration {step} has a forward and a backward that run as one, so neither has a time")
    evaluation, devices = not lists["bwd_start"], sizes.devices
    for name, kind in (("fwd", Kind.F), ("bwd", Kind.B if apart else Kind.BW), ("wgrad", Kind.W)):
        starts, ends = lists.get(f"{name}_start", []), lists.get(f"{name}_end", [])
        if len(starts) > (expected := sizes.chunks * sizes.microbatches) and not evaluation:
            raise ValueError(f"iteration {step} has {len(starts)} of {name}_start, not {expected}")
        in_order = [divmod(n, devices * sizes.chunks) for n in range(len(starts))]  # Megatron's: groups of devices
        numbers = lists.get(f"{name}_minibatch") or [group * devices + n % devices for group, n in in_order]
        chunks = lists.get(f"{name}_chunk") or [
            n // devices if kind is Kind.F else sizes.chunks - 1 - n // devices for _, n in in_order
        ]
        for start, end, number, chunk in zip(starts, ends, numbers, chunks, strict=False):
            most = sizes.microbatches + 1  # some number from 1
            if not (0 <= int(chunk) < sizes.chunks and int(number) >= 0 and (evaluation or int(number) < most)):
                raise ValueError(
                    f"iteration {step} has {name} of micro-batch {number} and chunk {chunk}: "
                    f"{sizes.microbatches} and {sizes.chunks} are numbered from 0"
                )
            yield ChunkOp(kind, rank, int(chunk), int(number), step, float(start), float(end) - float(start))
