"""How silos agree on columns, categories, labels and scale without showing each other a row."""
