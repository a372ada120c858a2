"""The paper's figures and tables, recomputed, and tables of our own; every command here has `--help`.

    python -m experiments.reproduce         the paper's figures and tables
        synthetic_problem, _tuning, _study, _figures, _tables     on synthetic data, every method at its best
        image_plans, _study, _tables, _curves, _figures           on images, methods tuned by `scaffpd.compare`
    python -m experiments.image_decisive    tables on images that decide between methods: every row at its best
        image_rows, _divisions, _exact, _pieces, _findings        rows and choices, one partition, one piece, the page
    python -m experiments.personal          clients alone, one model, or models of their own, on natural silos
    python -m experiments.tct_end_to_end    train, convexify, train, from random weights
    packed, spectral, small_networks, csv_files                   packed images, losses in eigenvectors, networks, CSV

Runs go to the processes of `scaffpd.study.comparison`. It tunes the methods of the paper's tables, and rows of the decisive
tables climb by its rule; `synthetic_tuning` alone chooses with hindsight, with x* known.
"""
