"""From rows to a model that can be trained, wherever the rows are."""
