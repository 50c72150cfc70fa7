"""A training that follows the solver service, or a search on its own host; no step waits for either.

- `follow`: the loop of a training; `client`: what it asks, without the loop;
- `job`: one job of the service, also for the command line; `requests`: HTTP requests to it.
"""
