"""One pipeline stage: the ops F, B, W, BW, C, O, D and R on the user's module. B is the input gradient alone
(PyTorch's I), BW the full backward (PyTorch's B).

- `io`: the tensors that pass between stages;
- `runner`: the ops; `forwards`: F and C; `running`: what a stage has of a micro-batch; `split`: the split backward;
- `learn`: finds the tensors by running the forward once;
- `outside`: parameters that a stage uses and its module does not have, as those of `loss_fn`;
- `levels`: what an F keeps where a C repeats it;
- `replay`: runs a forward again as it ran the first time, and undoes a step; `state`: what forwards change in modules;
- `trial`: one stage, tried alone; `timer`: times of its ops, and their spread.
"""
