"""Figures of a problem: one number for all micro-batches, or one for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import Discriminator, Field, Tag

from optpipe.errors import A_LIST, A_NUMBER, InputError

MOST_MS = 1e12
Ms = Annotated[float, Field(strict=True, ge=0, le=MOST_MS, allow_inf_nan=False)]
Bytes = Annotated[int, Field(strict=True, ge=0, le=2**53)]
T = TypeVar("T")
# Only the first wrong item is reported: a hostile file has many.
Items = Annotated[tuple[T, ...], Field(fail_fast=True)]


def _form(value: Any) -> str:
    return A_LIST if isinstance(value, list | tuple) else A_NUMBER


# One for all micro-batches, or a list with one for each.
EachMs = Annotated[Annotated[Ms, Tag(A_NUMBER)] | Annotated[Items[Ms], Tag(A_LIST)], Discriminator(_form)]
EachBytes = Annotated[Annotated[Bytes, Tag(A_NUMBER)] | Annotated[Items[Bytes], Tag(A_LIST)], Discriminator(_form)]
Number = TypeVar("Number", int, float)


def of_microbatch(figure: Number | tuple[Number, ...], microbatch: int) -> Number:
    """The figure of one micro-batch."""
    return figure[microbatch] if isinstance(figure, tuple) else figure


def each_microbatch(combine: Callable[..., Any], *figures: Any) -> Any:
    """Figures combined for each micro-batch: one number if each of them is one, else a tuple."""
    lengths = [len(figure) for figure in figures if isinstance(figure, tuple)]
    if not lengths:
        return combine(*figures)
    return tuple(combine(*(of_microbatch(figure, j) for figure in figures)) for j in range(max(lengths)))


def one_for_all(figure: Number | tuple[Number, ...]) -> Number:
    """The figure where all micro-batches have the same one. Raises InputError where they differ."""
    numbers = set(figure if isinstance(figure, tuple) else (figure,))
    if len(numbers) > 1:
        raise InputError("micro-batches differ here: a problem with one number for each figure was expected")
    return numbers.pop()
