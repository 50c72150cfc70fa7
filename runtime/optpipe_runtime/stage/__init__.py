"""One pipeline stage: the ops F, B, W, BW, C, O, D and R on the user's module. B is the input gradient alone
(PyTorch's I), BW the full backward (PyTorch's B).

- `io`: the tensors that pass between stages, learned or derived;
- `runner`: the ops; `forwards`: F and C, and what a stage has of a micro-batch; `split`: the split backward;
- `outside`: parameters that a stage uses and its module does not have, as those of `loss_fn`;
- `levels`: what an F keeps where a C repeats it;
- `state`: what forwards change in modules; a forward runs again as it ran the first time, and a step is undone;
- `trial`: one stage, tried alone, and times of its ops.
"""
