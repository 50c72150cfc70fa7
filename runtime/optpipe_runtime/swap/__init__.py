"""How a better schedule replaces the one that runs, between two steps, and how the old one comes back.

- `schedules`: which schedule runs, is prepared while training goes on, is swapped in, or comes back;
- `step_times`: whether a schedule is slower than the one before.
"""
