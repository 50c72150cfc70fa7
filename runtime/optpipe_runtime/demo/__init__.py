"""The main job, small: a byte-level GPT trained on the Python standard library's own sources, started by `optpipe
demo`."""
