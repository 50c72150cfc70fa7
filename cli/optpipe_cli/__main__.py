"""`python -m optpipe_cli` is the command line."""

from optpipe_cli.main import main

main()
