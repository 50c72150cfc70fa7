"""A training that follows the solver service, or a search on its own host; no step waits for either.

- `follow`: the loop of a training; `client`: what it asks, without the loop;
- `requests`: HTTP requests to the service, and what is read of its answers.
"""
