"""What runs at a site: its file, its data, its answers."""
