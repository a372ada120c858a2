"""The paper's synthetic experiments, run again: rounds against distance to the optimum, with tuned baselines."""
