"""The modules of each stage, as torchtitan and NeMo AutoModel take them (`module_fqns_per_model_part`): written, read,
and checked, since both train a smaller model in silence where a layer is forgotten or misspelled."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise, takewhile

from optpipe.errors import InputError, did_you_mean
from optpipe.transformer.records import ModuleNames

FIELD = "module_fqns_per_model_part"
TORCHTITAN = ModuleNames(first=("tok_embeddings",), layer="layers", last=("norm", "lm_head"))
AUTOMODEL = ModuleNames(
    first=("model.embed_tokens",), layer="model.layers", last=("model.norm", "lm_head"), every=("model.rotary_emb",)
)
_KEY = re.compile(r"[\w\"']*\s*:(?=[\s\[]|$)")  # of YAML or JSON
_FLOW = re.compile(r"\[([^\[\]]*)\]")  # a list of a part, in YAML or JSON


def parts_of(modules: ModuleNames, counts: Sequence[int]) -> list[list[str]]:
    """The modules of stages of so many layers each."""
    cuts = [0, *accumulate(counts)]
    parts = [[f"{modules.layer}.{n}" for n in range(a, b)] for a, b in pairwise(cuts)]
    parts[0] = [*modules.first, *parts[0]]
    parts[-1] += modules.last
    return [[*part, *modules.every] for part in parts]


def read_parts(text: str, what: str) -> list[list[str]]:
    """The modules of each stage in a command with torchtitan's flag, or in YAML or JSON, a list in brackets for each.

    Raises InputError if there are none.
    """
    _, field, after = text.rpartition(FIELD)
    parts: list[list[str]] = []
    if field and after[:1].isspace():
        try:
            words = shlex.split(after.replace("\\\n", " "))
        except ValueError as error:
            raise InputError(f"{what}: {FIELD} is no list of words as a shell reads them: {error}") from None
        parts = [word.split(",") for word in takewhile(lambda word: ":" not in word and word[:1] != "-", words)]
    elif field:
        _, *lists = _KEY.split(after, maxsplit=2)  # up to the next key
        parts = [re.findall(r"[^\s,'\"]+", part) for part in _FLOW.findall(lists[0] if lists else "")]
    if not parts:
        raise InputError(f"{what}: no {FIELD}: torchtitan's flag, or a list in brackets for each stage, was expected")
    return parts


def complaints(parts: Sequence[Sequence[str]], counts: Sequence[int], modules: Sequence[ModuleNames]) -> list[str]:
    """What is wrong with the modules of each stage, one sentence each.

    Parameters
    ----------
    counts
        How many layers each stage of the schedule has.
    modules
        The names that the model may have: those count that are most like what is there.
    """
    names = set(chain.from_iterable(parts))
    expected = max(
        (parts_of(each, counts) for each in modules), key=lambda named: len(names & set(chain.from_iterable(named)))
    )
    every = set.intersection(*map(set, expected)) if len(expected) > 1 else set()
    wrong = []
    if len(parts) != len(counts):
        wrong.append(f"{len(parts)} parts: the schedule has {len(counts)} stages")
    place = {name: s for s, part in enumerate(expected) for name in part if name not in every}
    known, times = place.keys() | every, Counter(chain.from_iterable(parts))
    for s, part in enumerate(parts):
        for name in part:
            if name not in known:
                wrong.append(f"part {s}: {name} is no module of the model{did_you_mean(name, known, '; ')}")
            elif len(parts) == len(counts) and place.get(name, s) != s:
                wrong.append(f"part {s}: {name} belongs to stage {place[name]}")
        wrong += [f"part {s}: {name} is missing" for name in sorted(every - set(part))]
    wrong += [f"{name} is in no part: it would be left out of the model" for name in place if not times[name]]
    return wrong + [f"{name} is in {times[name]} parts" for name in place if times[name] > 1]
