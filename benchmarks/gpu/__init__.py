"""One GPU: what offloading costs, and how good predictions are."""
