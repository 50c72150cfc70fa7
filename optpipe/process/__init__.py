"""Solvers as child processes: the protocol, the child, its process group."""
