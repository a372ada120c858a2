"""Settings files: read strictly, and turned into objectives, algorithms and the user's own functions."""
