"""What a transformer costs on a GPU, by formula: from shape, parallelism and data sheet to a `Problem`."""
