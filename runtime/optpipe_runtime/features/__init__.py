"""The rooms of features. Each adds kinds of op, or changes steps, by one `Feature` (`execute.handler`). The runtime
without a room is whole: it refuses what needs the room, and does all else as before.

- `evictions`: activations wait on a peer (ops E, L, A, V);
- `windows`: gradients are reduced several times a step (ZeRO-2);
- `host_updates`: optimizers on the host (ops G, U, P);
- `post_validation`: updates that do not wait for the norm of all gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from optpipe.errors import InputError
from optpipe_runtime.execute.handler import Feature
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.features.evictions import Evictions
from optpipe_runtime.features.host_updates import HostUpdates
from optpipe_runtime.features.post_validation import PostValidations
from optpipe_runtime.features.windows import GradientWindows
from optpipe_runtime.options import Options


class Room(NamedTuple):
    """`make` is collective. `arguments` are those of `Pipeline` that only this room takes."""

    make: Callable[[Rank, Options], Feature]
    arguments: tuple[str, ...] = ()


EVICTIONS = Room(Evictions, ("peers",))
WINDOWS = Room(GradientWindows, ("whole_gradients",))
HOST_UPDATES = Room(HostUpdates, ("host_optimizers", "clip_host_updates"))
POST_VALIDATION = Room(PostValidations)

# In the order in which their hooks are called.
ROOMS: Sequence[Room] = (EVICTIONS, WINDOWS, HOST_UPDATES, POST_VALIDATION)


def make_features(rank: Rank, options: Options, rooms: Sequence[Room]) -> list[Feature]:
    """Collective: the features of a rank. Raises `InputError` for an argument whose room is missing."""
    for room in (EVICTIONS, WINDOWS, HOST_UPDATES, POST_VALIDATION):
        for name in room.arguments if room not in rooms else ():
            if getattr(options, name):
                raise InputError(f"{name} was given: this runtime was made without the feature that takes it")
    return [room.make(rank, options) for room in rooms]
