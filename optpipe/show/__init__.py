"""Pictures of schedules: in the terminal, as SVG, as a web page, as a trace for Perfetto."""
