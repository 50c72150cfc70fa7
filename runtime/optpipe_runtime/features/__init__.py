"""Kinds of op that may be left out, each added by one `Feature` (`execute.handler`), and other changes of a step.

- `evictions`: activations wait on a peer (ops E, L, A, V);
- `windows`: gradients are reduced several times a step (ZeRO-2);
- `host_updates`: optimizers on the host (ops G, U, P);
- `post_validation`: updates that do not wait for the norm of all gradients.
"""
