"""The paper's figures and tables, recomputed: `python -m experiments.reproduce --help`."""
