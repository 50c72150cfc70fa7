"""From a schedule to what one rank does: checks against this pipeline, then ops with their messages. Pure functions.

- `plan`: what one rank runs, and the order of transfers on a host link that several ranks share;
- `prepare`: from a schedule to a plan.
"""
