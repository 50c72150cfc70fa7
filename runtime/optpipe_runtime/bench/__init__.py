"""What `optpipe bench gpu` measures."""
