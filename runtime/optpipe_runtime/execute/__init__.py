"""Runs one rank's plan, op by op.

- `rank`: what one rank has: stages, connections, host memory;
- `executor`: one step, by `handler`s: `stage_ops`, and those of features; `report`: what comes of it;
- `batch`: cuts a batch into micro-batches, and has their shapes;
- `messages`: activations and gradients between ranks;
- `gradients`: their sums become means over micro-batches and over the replicas;
- `learner`: learns before the first step what passes between stages.
"""
