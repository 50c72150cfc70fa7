"""The problem on CP-SAT, whole or a window of it."""
