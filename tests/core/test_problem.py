"""The problem file: every wrong value is named, and files and hashes stay what they are."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from support.problems import parsed, pipeline, stage
from support.problems.strategies import problems

from optpipe import InputError, Kind, Problem, check, offload_ratio

STAGE = {"device": 0, **stage((10, 10, 8), (50, 20), offload=(12, 12, 50))}


def content(**changes: Any) -> dict[str, Any]:
    return {
        "format": "optpipe.problem/3",
        "microbatches": 2,
        "devices": [{"activation_budget_bytes": 100}] * 2,
        "stages": [STAGE, STAGE | {"device": 1}],
    } | changes


def with_devices(**changes: Any) -> dict[str, Any]:
    return content(devices=[{"activation_budget_bytes": 100} | changes] * 2)


def with_stage(without: str = "", **changes: Any) -> dict[str, Any]:
    base = content()
    base["stages"][1] |= changes
    base["stages"][1].pop(without, None)
    return base


OF_A_STAGE = [  # what begins with `stages[1].`
    ({"forward_ms": float("nan")}, r"forward_ms = nan"),
    ({"forward_ms": -1.0}, r"forward_ms = -1\.0"),
    ({"forward_ms": "10"}, r"forward_ms = '10'"),
    ({"offload_bytes": 51}, r"offload_bytes = 51: must be at most activation_bytes = 50"),
    ({"device": 2}, r"device = 2: there are 2 devices"),
    ({"recompute_ms": 1.0}, r"checkpoint_bytes is missing"),
    ({"evict_ms": 1.0}, r"load_ms is missing: a stage with evict_ms needs load_ms and evict_bytes"),
    ({"evict_ms": 1.0, "load_ms": 1.0, "evict_bytes": 51}, r"evict_bytes = 51: must be at most activation_bytes = 50"),
    ({"evict_ms": 1.0, "load_ms": 1.0, "evict_bytes": 5}, r"evict_ms = 1\.0: its device 1 needs a peer to evict to"),
    ({"gradient_out_ms": 1.0, "update_ms": 1.0}, r"parameters_in_ms is missing: a stage with gradient_out_ms needs"),
    ({"surprise": 1}, r"surprise is not a field"),
    ({"forwrd_ms": 1}, r"forwrd_ms is not a field of this format: did you mean forward_ms\?$"),
    ({"colour": 1}, r"colour is not a field of this format$"),
    ({"forward_ms": "x", "backward_input_ms": -1}, r"forward_ms = 'x': .* \(and 1 more: .*backward_input_ms\)$"),
    ({"forward_ms": [1.0]}, r"forward_ms has 1 entries: one number, or one for each of the 2 micro"),
    ({"forward_ms": [1.0, -3.0]}, r"forward_ms\[1\] = -3\.0: input should be greater"),
    ({"activation_bytes": [50, 1.5]}, r"activation_bytes\[1\] = 1\.5"),
    ({"activation_bytes": [50, 9]}, r"offload_bytes = \d+: must be at most activation_bytes\[1\] = 9"),
]
WRONG = [
    *((with_stage(**changes), rf"stages\[1\]\.{message}") for changes, message in OF_A_STAGE),
    (content(overlap_factor=[[1.0] * 2]), r"overlap_factor has 1 entries: one for each of the 2 stages, or one number"),
    (content(overlap_factor=[[1.0] * 2, [1.0]]), r"overlap_factor\[1\] has 1 entries: one for each of the 2 stages"),
    (content(overlap_factor=[[1.0] * 2, [1.0, 0.0]]), r"overlap_factor\[1\]\[1\] = 0\.0: input should be greater"),
    (content(overlap_factor=[[1.0] * 2, [1.5, 1.0]]), r"overlap_factor\[1\]\[0\] = 1\.5: input should be less"),
    (content(overlap_factor=[0.5, 0.5]), r"overlap_factor\[0\] = 0\.5"),
    (with_stage(forward_exchange=0.5), r"stages\[1\]\.backward_exchange is missing: a stage with forward_exchange"),
    (with_devices(peer=0), r"devices\[0\]\.peer = 0: a device evicts to another one"),
    (with_devices(peer=2), r"devices\[0\]\.peer = 2: there are 2 devices, numbered from 0"),
    (with_stage("forward_ms", forwrd_ms=1.0), r"\.forwrd_ms is not a field of this format: did you mean forward_ms\?"),
    (with_stage("forward_ms"), r"stages\[1\]\.forward_ms is missing"),
    (content(p2p_ms=[1.0] * 3), r"p2p_ms has 3 entries: one number, or one for each of the 2 microbatches"),
    (content(messages=[{"sender": 0, "receiver": 2, "ms": 1.0}]), r"messages\[0\]\.receiver = 2: there are 2 devices"),
    (content(messages=[{"sender": 1, "receiver": 1, "ms": 1.0}]), r"messages\[0\]\.receiver = 1: a message goes to an"),
    (content(messages=[{"sender": 0, "receiver": 1, "ms": 1.0}] * 2), r"messages\[1\]: .* stand there twice"),
    (with_stage("reload_ms"), r"stages\[1\]\.reload_ms is missing: a stage with offload_ms needs reload_ms"),
    (content(microbatches=0), r"microbatches = 0"),
    (content(microbatches=2**16, stages=[STAGE | {"offload_parts": 64}] * 16), r"offload_parts = 64: times 16 stages"),
    (content(microbatches=2**16, stages=[STAGE] * 100), r"microbatches = 65536"),
    (content(format="optpipe.schedule/2"), r"^problem is a schedule, a problem is expected: "),
    (content(format=["optpipe.problem/3"]), r"format = a list of 1: "),
    (content(stages=[]), r"stages = a list of 0"),
    (content(routes=[[0]]), r"stages\[1\] is on no route"),
    (content(routes=[[0, 1] * 2000]), r"routes\[0\]\[2\] = 0: a route passes a stage once"),
    (content(routes=[[0, 1], []], microbatch_routes=[0, 0]), r"routes\[1\] is empty"),
    (content(routes=[[0, 1], [1, 0]]), r"microbatch_routes is missing"),
    (content(routes=[[0, 1], [1, 0]], microbatch_routes=[0]), r"microbatch_routes has 1 entries"),
    (content(routes=[[0, 1], [1, 0]], microbatch_routes=[0, 2]), r"microbatch_routes\[1\] = 2"),
    (content(layers=[{"forward_ms": 1.0}]), r"layers\[0\]"),
    (with_devices(link=""), r"devices\[0\]\.link = ''"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=[message for _, message in WRONG])
def test_every_wrong_value_is_named(wrong, message):
    for read in (lambda: Problem.from_dict(wrong), lambda: Problem.from_json(json.dumps(wrong))):
        with pytest.raises(InputError, match=message) as caught:
            read()
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 300


NO_TEXT = (b"\xff", "\ud800".encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"microbatches": 1e999}', "[" * 9999, *NO_TEXT])
def test_text_that_is_no_problem_is_refused(text, tmp_path):
    with pytest.raises(InputError, match="problem"):
        Problem.from_json(text)
    with pytest.raises(InputError, match=r"nothing\.json: No such file"):
        Problem.load(tmp_path / "nothing.json")


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    problem, path = Problem.from_dict(content()), tmp_path / "p.json"
    problem.save(path)
    before = path.read_text()

    def full(self, *arguments, **options):
        with self.open("w") as file:
            file.write("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(InputError, match=r"p\.json: cannot be written: No space left on device"):
        problem.replace(name="other").save(path)
    assert path.read_text() == before
    assert [file.name for file in tmp_path.iterdir()] == ["p.json"]


@given(problems(beyond=True))
def test_files_read_back(problem):
    again = Problem.from_json(problem.to_json())
    assert again == problem
    assert again.sha256 == problem.sha256
    assert Problem.from_dict(json.loads(problem.to_json())) == problem


def test_cached_properties_do_not_affect_equality():
    one, two, other = (Problem.from_dict(content(p2p_ms=ms)) for ms in (1.0, 1.0, 2.0))
    for problem in (one, two, other):
        assert problem.costs.ms.shape == (len(Kind), 2, problem.microbatches)
        assert problem.shared_links == {}
    assert one == two
    assert one != other
    assert one.model_copy(update={"p2p_ms": 2.0}).sha256 == other.sha256 != one.sha256


def test_the_hash_depends_on_every_field_but_the_name():
    base = Problem.from_dict(content())
    assert Problem.from_dict(content(name="other")).sha256 == base.sha256
    assert Problem.from_dict(content(p2p_ms=0.1)).sha256 != base.sha256
    assert Problem.from_dict(with_stage(forward_ms=10.0)).sha256 == base.sha256  # 10 and 10.0 are one number
    assert Problem.from_dict(with_stage(saved_for_weight_bytes=21)).sha256 != base.sha256


def test_memory_for_a_number_of_activations():
    stages = [STAGE | {"device": d, "activation_bytes": nbytes} for d, nbytes in ((0, 60), (1, 70), (0, 81))]
    problem = Problem.from_dict(content(stages=stages)).with_memory_for(1.5)
    assert [device.activation_budget_bytes for device in problem.devices] == [211, 105]


def test_micro_batches_with_equal_figures_are_of_one_class_however_these_are_written():
    costs = Problem.from_dict(with_stage(forward_ms=[10.0, 10.0])).costs
    assert (costs.are_equal, costs.classes) == (True, [[0, 1]])


ABLE = STAGE | stage((10, 10, 8), (50, 20), offload=(12, 12, 50), recompute=(5, 9), evict=(3, 3, 40))


@pytest.mark.parametrize("name", sorted(ABLE.keys() - {"device"}))
def test_micro_batches_that_differ_in_any_figure_are_of_two_classes(name):
    other = ABLE | {name: [ABLE[name], ABLE[name] + (1 if name == "activation_bytes" else -1)]}
    devices = [{"activation_budget_bytes": 100, "peer": 1 - d} for d in range(2)]
    costs = Problem.from_dict(content(devices=devices, stages=[ABLE, other | {"device": 1}])).costs
    assert (costs.are_equal, costs.classes) == (False, [[0], [1]])


def test_a_fixed_order_is_kept():
    problem = Problem.from_dict(content(fixed_order=True))
    swapped = parsed(problem, "0F1 0F0 0BW0 0BW1", "1F1 1F0 1BW0 1BW1")
    assert check(problem, swapped) == ["0F1 stands before 0F0: the problem has fixed_order"]
    assert check(problem, parsed(problem, "0F0 0F1 0BW0 0BW1", "1F1 1F0 1BW0 1BW1")) == []
    assert "fixed_order" not in Problem.from_dict(content()).to_dict()


def test_k_of_a_stage_is_the_round_trip_over_its_work():
    stages = [
        stage((14, 7, 7), offload=(12, 16, 10)),
        stage((4, 2, 2), offload=(1, 5, 10)),
        stage((4, 2, 2)),
        stage((0, 0, 0), offload=(1, 1, 10)),
        stage((2, 1, 1), offload=(0, 0, 10)),
        stage((0, 0, 0), offload=(0, 0, 10)),
    ]
    assert offload_ratio(pipeline(6, 2, 100, stages)) == [1.0, 0.75, None, float("inf"), 0.0, 0.0]
