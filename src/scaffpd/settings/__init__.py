"""Read settings files strictly, and make objectives and algorithms from them."""
