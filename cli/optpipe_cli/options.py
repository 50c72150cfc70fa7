"""Records whose fields are the options of a command: declared and checked there, and read from words here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, TypeVar

from cyclopts import Parameter, Token
from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

Record = TypeVar("Record", bound=BaseModel)


class _FromWords:
    """Metadata of a record that is read from words, as a shell has them."""

    def __get_pydantic_core_schema__(self, record: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(partial(read, record))


Options = Annotated[Record, Parameter(name="*"), _FromWords()]


def read(record: type[Record], words: dict[str, Any]) -> Record:
    """The record with these fields: each is a word, several words, or of a flag True or False. Raises pydantic's
    `ValidationError`."""
    texts = {name: ",".join(word) if isinstance(word, list) else str(word) for name, word in words.items()}
    return record.model_validate_strings(texts)


def _numbers(_: Any, tokens: Sequence[Token]) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in tokens[0].value.split(","))
    except ValueError:
        raise ValueError(f"{tokens[0].value!r}: one number, or several with commas between, were expected") from None


Numbers = Annotated[tuple[int, ...], Parameter(converter=_numbers, n_tokens=1, accepts_keys=False, metavar="N[,N...]")]
