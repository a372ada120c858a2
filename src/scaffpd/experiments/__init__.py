"""Experiments: jobs that train several models on one dataset and return what was measured."""
