"""Tables of rows: read, split, and encoded by columns, categories, labels and scale that clients agree on by sums."""
