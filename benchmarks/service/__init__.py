"""The service measured from outside, with real processes, sockets and databases: under load, and after failures."""
