"""The paper's protocol end to end, in seconds: PipeOffload first, the MILP beside the training, its schedules swapped
in."""

from __future__ import annotations

import pytest
from support.ranks.scripts import torchrun_on
from support.ranks.worker import Ranks

from optpipe_cli.bench import protocol
from optpipe_runtime.bench.protocol import FIRST, ProtocolSettings
from optpipe_runtime.demo.gpt import Size
from optpipe_runtime.demo.train import DemoSettings

SMALL = DemoSettings(
    microbatches=2,  # without offload, so that the search ends with a proof, after a second of computing
    budget=2.4,
    rounds=1,
    turn=1,
    size=Size(width=64, heads=2, blocks=4, context=64, sequences=2),
)


@pytest.mark.parametrize("torchrun", [pytest.param("real", marks=pytest.mark.soak), "on ranks"])
def test_the_protocol_runs_with_a_backend_that_is_named(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, torchrun: str
) -> None:
    pytest.importorskip("pulp")
    if torchrun == "on ranks":
        monkeypatch.setattr(protocol, "torchrun", torchrun_on(ranks))
    told = protocol.run(ProtocolSettings(milp_s=100.0, solver="pulp:cbc", training=SMALL))
    assert told["first"]["method"] == FIRST
    assert told["steps_beside"] > 0
    predicted = [told["first"]["predicted_ms"], *(found["predicted_ms"] for found in told["found"])]
    assert predicted == sorted(set(predicted), reverse=True)
    assert sum(told["swaps"].values()) == len(told["found"])
    assert told["best"]["predicted_ms"] <= min(predicted)
    assert [note for note in told["notes"] if note.startswith("milp: PuLP's PULP_CBC_CMD: ")]
