"""The ranks of one pipeline: who they are, how they reach each other, and how they agree.

- `team`: the ranks of one pipeline, their connections, and how they fail together;
- `cpu_group`: small collectives over CPU tensors and Python objects, with which ranks agree;
- `layout`: which rank has which stage, which stages each micro-batch passes, who shares a host link;
- `replicas`, `ties`, `clipping`: gradients that more than one rank has a part in.
"""
