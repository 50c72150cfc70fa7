"""What a pipeline does beside what was predicted, for `optpipe bench runtime` and `optpipe demo`."""
