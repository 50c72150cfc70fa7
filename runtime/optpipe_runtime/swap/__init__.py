"""How a better schedule replaces the one that runs, between two steps, and how the old one comes back.

- `schedules`: which schedule runs, is swapped in, or comes back; `offers`: prepares one while training goes on;
- `step_times`: whether a schedule is slower than the one before.
"""
