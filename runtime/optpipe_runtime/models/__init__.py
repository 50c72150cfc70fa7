"""A model as its author wrote it becomes the stages of a pipeline: `stages_of`.

`model` cuts a list of layers, or a causal language model of transformers. Each stage is a `Part`. `proof` shows
that a language model is the row of its stages, on a small copy.
"""
