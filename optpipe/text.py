"""Text for people: what others wrote as one line that a terminal only shows, and sizes in bytes."""

from __future__ import annotations

import unicodedata


def printable(text: object, longest: int | None = None) -> str:
    r"""Return the text as one line that a terminal only shows, of `longest` characters at most; `...` stands for the
    rest.

    Characters that would move the cursor, change colours, begin another line or turn the direction of writing become
    visible, such as `\x1b`, `\n` and `\u202e`; so do lone surrogates, which no output can have.
    """
    line = str(text)
    if longest is not None and len(line) > longest:
        line = line[:longest] + "..."
    return line if line.isprintable() else "".join(map(_visible, line))


def _visible(character: str) -> str:
    if character.isprintable() or unicodedata.category(character) == "Zs":  # a space of another width
        return character
    return character.encode("unicode_escape").decode()


def bytes_text(size: float, digits: int = 3) -> str:
    """Write a size such as `15 GB`, in decimal units like link speeds and data sheets."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        rounded = float(f"{size:.{digits}g}") if unit != "B" else round(size)
        if rounded < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{rounded:.15g} {unit}"


def distinct_sizes(*sizes: int) -> list[str]:
    """Write sizes with three digits, or with as many as it takes that different ones do not read alike."""
    texts: list[str] = []
    for digits in range(3, 16):
        texts = [bytes_text(size, digits) for size in sizes]
        if len(set(texts)) == len(set(sizes)):
            break
    return texts
