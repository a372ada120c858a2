"""The paper's figures and tables, recomputed, and tables of our own; every command here has
`--help`.

python -m experiments.synthetic    the paper's figures on synthetic data, every method at its best
python -m experiments.images       the paper's tables on images, tables that decide,
train-convexify-train python -m experiments.personal     clients alone, one model, or models of
their own, on natural silos tables, style                      CSV files and Markdown tables, the
style of figures
"""
