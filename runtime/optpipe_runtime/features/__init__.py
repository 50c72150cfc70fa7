"""The rooms of features. Each adds kinds of op, or changes steps, by one `Feature` (`execute.handler`). The runtime
without a room is whole: it refuses ops of the room, and does all else as before.

- `evictions`: activations wait on a peer (ops E, L, A, V);
- `windows`: gradients are reduced several times a step (ZeRO-2);
- `host_updates`: optimizers on the host (ops G, U, P);
- `post_validation`: updates that do not wait for the norm of all gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from optpipe_runtime.arguments import Options
from optpipe_runtime.execute.handler import Feature
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.features.evictions import Evictions
from optpipe_runtime.features.host_updates import HostUpdates
from optpipe_runtime.features.post_validation import PostValidations
from optpipe_runtime.features.windows import GradientWindows

# In the order in which their hooks are called. Making one is collective.
ROOMS: Sequence[Callable[[Rank, Options], Feature]] = (Evictions, GradientWindows, HostUpdates, PostValidations)
