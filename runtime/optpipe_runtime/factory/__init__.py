"""What `optpipe profile` measures, by the word that a user gives it.

- `setup`: what is measured on one rank, and the sizes that the user may give;
- `find`: which model is meant, a user's own function among them;
- `huggingface`: a config of transformers; `torchtitan`: a flavour of one of its models; both have random weights, on a
  rank only those of its stage.
"""

from optpipe_runtime.factory.find import find_factory
from optpipe_runtime.factory.setup import Setup, Sizes

__all__ = ["Setup", "Sizes", "find_factory"]
