"""How a better schedule replaces the one that runs, between two steps, and how the old one comes back.

- `schedules`: prepares, loads and swaps schedules; `offers`: prepares an offered one while training goes on;
- `running`: which schedule runs, and when to go back; `trials`: steps that may be undone.
"""
