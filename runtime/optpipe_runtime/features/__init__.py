"""Kinds of op that may be left out, each added by one `Feature` (`execute.rank`).

- `evictions`: activations wait on a peer (ops E, L, A, V);
- `host_updates`: optimizers on the host (ops G, U, P); `host_optimizer`: one of them.
"""
