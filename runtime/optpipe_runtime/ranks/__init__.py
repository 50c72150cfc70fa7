"""The ranks of one pipeline: who they are, their messages, how they agree."""
