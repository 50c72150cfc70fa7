"""`python -m optpipe` is the command line."""

from optpipe.cli.main import main

main()
