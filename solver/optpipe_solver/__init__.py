"""Problem to schedules, better and better. Started as `python -m optpipe_solver`; imports nothing heavy by itself."""
