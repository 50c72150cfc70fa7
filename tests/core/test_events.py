"""Chrome traces in a stream: the events are those of the whole text, however it is cut into pieces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import InputError
from optpipe.measured.events import Events, read_pieces

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
EVENTS = st.lists(st.dictionaries(st.text(), VALUES, max_size=4), max_size=5)


@given(
    EVENTS, st.dictionaries(st.text().filter(lambda name: name != "traceEvents"), VALUES), st.integers(1, 9), st.data()
)
def test_a_stream_has_the_events_and_the_fields_of_the_whole(events, rest, length, data):
    indent = data.draw(st.sampled_from((None, 1)))
    whole = list(rest.items())
    whole.insert(data.draw(st.integers(0, len(whole))), ("traceEvents", events))
    text = json.dumps(dict(whole), indent=indent)
    stream = Events([text[i : i + length] for i in range(0, len(text), length)], "f")
    assert list(stream) == events
    assert (stream.rest, stream.listed, stream.others) == (rest, True, 0)
    listed = Events(json.dumps([*events, 3]), "f")  # a character at a time
    assert list(listed) == events
    assert (listed.listed, listed.others) == (True, 1)
    with pytest.raises(InputError, match=r"^f is not JSON: "):
        list(Events([text[: data.draw(st.integers(1, len(text) - 1))]], "f"))


@pytest.mark.parametrize("number", [1.5e-07, -0.25, 1e300, 12])
def test_a_number_may_be_cut_anywhere(number):
    text = json.dumps({"traceEvents": [], "number": number})
    for cut in range(1, len(text)):
        stream = Events([text[:cut], text[cut:]], "f")
        assert list(stream) == []
        assert stream.rest == {"number": number}, cut


@pytest.mark.parametrize("text", ["", "[1, 2", "{} {}", '{"a": 1 "b": 2}', "[}", "x", '{"traceEvents": [{}, ]}'])
def test_what_is_not_json_is_one_sentence(text):
    with pytest.raises(InputError, match=r"^f is not JSON: .* \(char \d+\)$"):
        list(Events([text], "f"))


def test_a_packed_file_is_read_in_pieces(tmp_path: Path):
    path, text = tmp_path / "t.json.gz", json.dumps([{"n": n} for n in range(400_000)])
    path.write_bytes(gzip.compress(text.encode()))
    pieces = list(read_pieces(path))
    assert "".join(pieces) == text
    assert len(pieces) > 4
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match="is not valid gzip"):
        list(read_pieces(path))
