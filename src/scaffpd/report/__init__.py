"""The record of a run, its folder, its page, and predictions of its models."""
