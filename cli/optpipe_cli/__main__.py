"""Run the command line by `python -m optpipe_cli`."""

from optpipe_cli.main import main

main()
