"""Tables of rows: read, split, and encoded by what clients agree on by sums."""
