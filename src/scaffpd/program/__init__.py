"""What `train` and `path` do: settings become sites, and a record becomes a folder."""
