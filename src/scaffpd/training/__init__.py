"""The one loop that drives every algorithm, clients in this process, and a run's history."""
