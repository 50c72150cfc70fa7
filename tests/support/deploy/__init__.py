"""The files of deployments, and what is started by them."""
