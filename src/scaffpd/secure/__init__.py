"""Sums of masked vectors: the server learns weighted sums, and no single vector."""
