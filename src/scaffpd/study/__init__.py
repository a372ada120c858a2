"""Studies over many runs: does joining pay, which strengths, the path of fairness, coalitions,
comparisons.
"""
