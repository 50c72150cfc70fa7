"""Evictions to a peer (BPipe): ops E and L of the stage's rank, with D, and A and V of its peer.

- `evictions`: the feature and its handlers; `peers`: the transfers between the two ranks.
"""

from optpipe_runtime.features.evictions.evictions import Evictions, require_peers
from optpipe_runtime.features.evictions.peers import EvictionOrder, Peers

__all__ = ["EvictionOrder", "Evictions", "Peers", "require_peers"]
