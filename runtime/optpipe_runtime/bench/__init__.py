"""What `optpipe bench runtime` and `optpipe bench gpu` measure."""
