"""The paper's tables on images, and ours; `python -m experiments.images --help`.

loading, networks, small_networks    images on disk; ImageNet networks; networks that train in
minutes entk, features, convexify            gradients of single images; tables of them; a network
made linear plans, study, tables, curves, figures    the paper's tables, methods tuned by
`scaffpd.compare` decisive, pieces, rows, exact, divisions, spectral, findings    tables where every
row is at its best tct                                  train, convexify, train, from random weights
"""
