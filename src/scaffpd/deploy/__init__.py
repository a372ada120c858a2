"""Across real organisations: the same algorithms on NVIDIA FLARE."""
