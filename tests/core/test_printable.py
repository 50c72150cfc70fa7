"""Text of others as one line that a terminal only shows."""

from __future__ import annotations

import pytest

from optpipe.text import printable


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("4 × 8, naïve → 12 µs", "4 × 8, naïve → 12 µs"),
        ("\x1b[31mred\x1b]0;title\x07", r"\x1b[31mred\x1b]0;title\x07"),
        ("good\nvalid: it runs\r\x85\u2028", r"good\nvalid: it runs\r\x85\u2028"),
        ("\u202efdp.exe\u2066\x9b2J\x00\x7f\ud800", r"\u202efdp.exe\u2066\x9b2J\x00\x7f\ud800"),
        (InterruptedError("a\tb"), r"a\tb"),
    ],
)
def test_what_a_terminal_would_obey_is_made_visible(text: object, line: str) -> None:
    assert printable(text) == line


def test_a_long_text_is_cut() -> None:
    assert printable("\n" * 200_000, longest=3) == r"\n\n\n..."
    assert printable("abc", longest=3) == "abc"
