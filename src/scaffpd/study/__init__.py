"""Studies over many runs: does joining pay, the path of fairness, comparisons."""
