"""The ranks of one pipeline and their inner peers: who they are, how they reach each other, and how they agree.

- `grid`: the ranks of all pipelines, which of them compute the same stages together, and by what;
- `team`: the ranks that train one model, and their connections;
- `cpu_group`: small collectives over CPU tensors and Python objects, with which ranks agree;
- `layout`: which rank has which stage, which stages each micro-batch passes, who shares a host link;
- `replicas` (of copied and `sharded` stages), `gradients` (ties, clipping): what more than one rank has a part in.
"""
