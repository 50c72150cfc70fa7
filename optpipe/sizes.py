"""Sizes in bytes as people read them."""

from __future__ import annotations


def bytes_text(size: float, digits: int = 3) -> str:
    """Writes a size such as `15 GB`, in decimal units like link speeds and data sheets."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        rounded = float(f"{size:.{digits}g}") if unit != "B" else round(size)
        if rounded < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{rounded:.15g} {unit}"


def told_apart(*sizes: int) -> list[str]:
    """Write sizes with three digits, or with as many as it takes that different ones do not read alike."""
    texts: list[str] = []
    for digits in range(3, 16):
        texts = [bytes_text(size, digits) for size in sizes]
        if len(set(texts)) == len(set(sizes)):
            break
    return texts
