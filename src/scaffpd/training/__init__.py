"""The one loop that drives every algorithm, clients in this process, and what a run leaves behind."""
