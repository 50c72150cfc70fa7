"""Text from files, from a service or from another program, before it is printed or logged."""

from __future__ import annotations

import unicodedata


def printable(text: object, longest: int | None = None) -> str:
    r"""Return the text as one line that a terminal only shows.

    Characters that would move the cursor, change colours, begin another line or turn the direction of writing become
    visible, such as `\x1b`, `\n` and `\u202e`; so do lone surrogates, which no output can have.

    Parameters
    ----------
    text
        Anything with a text.
    longest
        How many characters of it are kept; `...` stands for the rest. By default all.
    """
    line = str(text)
    if longest is not None and len(line) > longest:
        line = line[:longest] + "..."
    return line if line.isprintable() else "".join(map(_visible, line))


def _visible(character: str) -> str:
    if character.isprintable() or unicodedata.category(character) == "Zs":  # a space of another width
        return character
    return character.encode("unicode_escape").decode()
