"""Write the pack that a release carries (`optpipe_cache.storage`): `make pack`.

Each problem is one of the grid below. Its schedule is the shortest that a search among the rules of a list scheduler
finds within a number of simulated ops: work that is counted, so the same schedules come out everywhere. What is solved
is kept in build/pack.sqlite; a build that was ended goes on from there.
"""

from __future__ import annotations

import argparse
import json
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path

from optpipe.evaluate.objective import length_ms, reaches
from optpipe.model.placement import Placement
from optpipe.model.problem import Problem
from optpipe.model.records import Device, Stage
from optpipe.reuse import by_rules
from optpipe.schedule import Schedule, check
from optpipe_cache import Cache, Entry, features, structure
from optpipe_cache.storage import PACK_PATH, FileStorage, StoredRow
from optpipe_solver.bounds import lower_bound

SOLVED = Path("build/pack.sqlite")
WORK = 1_000_000  # ops that a search simulates
BEGINNING_OF_ZIP = (1980, 1, 1, 0, 0, 0)  # the same rows make the same file

DEVICES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
CHUNKED = (2, 4, 8, 16)  # devices of pipelines that also come with two chunks each
MICROBATCHES = 2  # a device: for more, a lookup keeps the rules, whose steady state lasts longer
TIMES = ((30.0, 32.0, 28.0), (30.0, 36.0, 21.0))  # F, B and W, with little attention and with much
MEMORY = (0.55, 0.9, 1.7)  # activations of the device's own stages that fit, for each device of the pipeline
LINKS = (0.7, 1.5, 3.5)  # times of a forward that an activation needs to leave
P2P = 0.03  # of a forward
SIZE = 10**9  # of an activation

# What stages can do beside computing: whether activations leave, in which mode links work, whether they are computed
# again, and what of an activation W needs. The last is what `optpipe model` makes of a transformer.
ABILITIES = (
    (False, "half_duplex", False, 0.5),
    (True, "half_duplex", False, 0.5),
    (True, "half_duplex", True, 0.6),
    (True, "full_duplex", True, 0.9),
)
OF_CHUNKED = (ABILITIES[0], ABILITIES[1], ABILITIES[-1])


def problems(devices: tuple[int, ...] = DEVICES) -> Iterator[Problem]:
    """Yield the problems of the grid, small ones first."""
    for p in devices:
        for abilities, times, memory in product(ABILITIES, TIMES, MEMORY):
            for link in LINKS if abilities[0] else LINKS[:1]:
                yield _problem(p, abilities, times, memory, link)
        for shape in ("looped", "v") if p in CHUNKED else ():
            placement = Placement(chunks=2, shape=shape)
            for abilities, times, memory in product(OF_CHUNKED, TIMES, MEMORY):
                for link in LINKS if abilities[0] else LINKS[:1]:
                    yield placement.apply(_problem(p, abilities, times, memory, link))


def _problem(
    p: int, abilities: tuple[bool, str, bool, float], times: tuple[float, float, float], memory: float, link: float
) -> Problem:
    offload, mode, recompute, saved = abilities
    forward, backward, weight = times
    stage = Stage(
        device=0,
        forward_ms=forward,
        backward_input_ms=backward,
        backward_weight_ms=weight,
        activation_bytes=SIZE,
        saved_for_weight_bytes=int(saved * SIZE),
        **({"offload_ms": link * forward, "reload_ms": link * forward, "offload_bytes": SIZE} if offload else {}),
        **({"recompute_ms": forward, "checkpoint_bytes": SIZE // 12} if recompute else {}),
    )
    return Problem(
        microbatches=MICROBATCHES * p,
        p2p_ms=P2P * forward,
        transfer_mode=mode,
        devices=(Device(activation_budget_bytes=int(max(1.05, memory * p) * SIZE)),) * p,
        stages=tuple(stage.model_copy(update={"device": d}) for d in range(p)),
    )


def solved(problem: Problem) -> tuple[Schedule | None, float]:
    """Return a valid schedule of the problem, and a bound on all of them."""
    schedule = by_rules(problem, None, "makespan", WORK)
    bound_ms = lower_bound(problem)
    return (schedule if schedule and not check(problem, schedule) else None), bound_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES, help="of the pipelines")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--output", type=Path, default=PACK_PATH)
    asked = parser.parse_args()
    cache = Cache(FileStorage(SOLVED))
    wanted = list(problems(tuple(asked.devices)))
    missing = [problem for problem in wanted if cache.storage.entry(problem.sha256, "makespan") is None]
    print(f"{len(wanted)} problems, {len(missing)} to be solved", flush=True)
    unsolved = 0
    with ProcessPoolExecutor(asked.jobs, get_context("spawn")) as pool:
        for n, (schedule, bound_ms) in enumerate(pool.map(solved, missing), 1):
            if schedule is None:
                unsolved += 1
                continue
            proven = reaches(length_ms(schedule, "makespan"), bound_ms)
            cache.add(schedule, "optimal" if proven else "feasible", bound_ms, verified=True)
            if n % 50 == 0:
                print(f"{n} of {len(missing)}", flush=True)
    hashes = {problem.sha256 for problem in wanted}
    rows = [row for row in map(_row, cache.export_lines(), cache.entries()) if row.problem_sha256 in hashes]
    write_pack(asked.output, rows)
    print(f"{len(rows)} schedules, {unsolved} problems without; {asked.output.stat().st_size / 1e6:.2f} MB")


def write_pack(path: Path, rows: Iterable[StoredRow]) -> None:
    """Write the rows as a pack."""
    members = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.problem_sha256):
        line = json.dumps([row.problem_sha256, row.features.hex(), row.entry])
        members[f"{row.structure}/{row.objective}"].append(f"{line}\n")
    with zipfile.ZipFile(path, "w") as pack:
        for name, lines in sorted(members.items()):
            member = zipfile.ZipInfo(name, BEGINNING_OF_ZIP)
            member.compress_type = zipfile.ZIP_LZMA
            pack.writestr(member, "".join(lines))


def _row(text: str, entry: Entry) -> StoredRow:
    problem = entry.problem
    return StoredRow(
        problem.sha256, entry.objective, structure(problem), features(problem).packed, used="", hits=0, entry=text
    )


if __name__ == "__main__":
    main()
