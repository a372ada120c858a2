"""The paper's synthetic problem, every method at its best: `python -m experiments.synthetic`."""
