"""Sums of masked vectors: the server learns weighted sums, and no single vector."""

SHARE = 0.9  # of a sum over the clients that do not collude, which one of them may have
