"""A schedule to look at: in the terminal, as a picture or page, as a trace for Perfetto."""
