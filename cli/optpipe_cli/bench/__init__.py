"""`optpipe bench ...`: print the figures in the docs again, measured on this machine. One file per command."""
