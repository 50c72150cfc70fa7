"""The command line, `optpipe`.

It is the only component that uses all others. A command imports what it needs when it runs, so that `--help` is quick.
"""
