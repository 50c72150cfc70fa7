"""Optimizer steps that do not wait for the norm of all gradients (OptPipe, section 4.3; Zero Bubble,
Qi et al. 2023, section 4).

A rank updates its stages as soon as its own gradients are there, as if nothing had to be clipped. Meanwhile the ranks
exchange the norms of their parts. At the end of the next step these have long arrived, and every rank computes the same
norm of the whole. If it asks for another update, every rank undoes the step in progress, takes the update back, to the
bit, makes the right one, and runs the step again.

Zero Bubble computes the way back; an update in floating point cannot be computed back to the bit. So parameters,
gradients and optimizer state are copied before each update that is ahead of its norm, and kept until the norm is there.

- `feature`: when an update goes ahead, and when it is corrected; `update`: what it takes to take one back.
"""

from optpipe_runtime.features.post_validation.feature import PostValidations

__all__ = ["PostValidations"]
