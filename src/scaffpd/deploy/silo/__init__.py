"""What runs at a site: its data, what it answers, what it writes down, and what its operator gets to see."""
