"""Op texts: they read back, and anything else is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import InputError, Kind, Op, Pair, Program
from optpipe.model.ops import parse_item

numbers = st.integers(0, 10**9 - 1)
compute = st.builds(Op, st.sampled_from([Kind.F, Kind.B, Kind.W, Kind.BW, Kind.C]), numbers, numbers, st.just(0))
PARTED = [Kind.O, Kind.D, Kind.R]
parted = st.builds(Op, st.sampled_from(PARTED), numbers, numbers, st.integers(0, 63))
whole = st.builds(Op, st.sampled_from([kind for kind in Kind if kind not in PARTED]), numbers, numbers, st.just(0))
items = st.one_of(whole, parted, st.builds(Pair, compute, compute))


@given(items)
def test_parsing_reverses_printing(item):
    assert parse_item(str(item)) == item


@given(st.lists(items, max_size=30))
def test_a_program_reads_back_what_it_prints(listed):
    program = Program.from_items(listed)
    assert Program.parse(program.texts()) == program
    assert list(program) == listed
    assert program.texts() == [str(item) for item in listed]


WRONG = "F0|0F|0X0|00F1|0F01|-1F0|0F3.1|0E3.1|0f3|0F3 |0F3+|0F3+0B1+0F2|0O1.|٣F0|0F1 0F2"


@pytest.mark.parametrize("text", ["", *WRONG.split("|")])
def test_a_wrong_text_is_refused_and_quoted(text):
    with pytest.raises(InputError, match=r"op '|program entry"):
        Program.parse(["0F0", text])


def test_the_message_lists_the_kinds():
    with pytest.raises(
        InputError, match=r"op '0X0': expected stage, kind \(F, B, W, BW, C, O, D, R, E, L, A, V.*\), micro-batch and"
    ):
        Op.parse("0X0")


def test_part_0_may_be_written():
    assert Op.parse("0O3.0") == Op.parse("0O3") == Op(Kind.O, 0, 3, 0)
