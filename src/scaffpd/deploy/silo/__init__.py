"""The silo's side: its data, its answers, its records, and what its operator sees."""
