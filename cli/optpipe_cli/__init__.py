"""The command line, `optpipe`. Only here may the core's package import the other components, inside the command that
needs one."""
