"""Text of others as one line that a terminal only shows; sizes in bytes."""

import pytest

from optpipe.text import bytes_text, distinct_sizes, printable


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


def test_bytes_are_readable() -> None:
    sizes = {0: "0 B", 999: "999 B", 1000: "1 kB", 1.5e6: "1.5 MB", 15e9: "15 GB", 2e12: "2 TB", 2**62: "4610000 TB"}
    sizes |= {999.7: "1 kB", 999_700_000: "1 GB"}
    assert {size: bytes_text(size) for size in sizes} == sizes
    assert distinct_sizes(40 * 10**9, 30 * 10**9) == ["40 GB", "30 GB"]
    assert distinct_sizes(30 * 10**9 + 1, 30 * 10**9) == ["30.000000001 GB", "30 GB"]
