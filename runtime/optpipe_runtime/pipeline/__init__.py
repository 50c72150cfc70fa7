"""A pipeline of stages: `Pipeline`, what users call, and its parts.

- `build`: its arguments, checked, and what a rank makes of them;
- `step_runner`: steps that are repeated until they count; `post_validation`: updates ahead of their norm.
"""

from optpipe_runtime.pipeline.pipeline import Pipeline

__all__ = ["Pipeline"]
