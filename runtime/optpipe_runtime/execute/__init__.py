"""Runs one rank's program: lowering, the executor, a stage's ops."""
