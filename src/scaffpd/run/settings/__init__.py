"""Read settings files strictly, and make objectives, algorithms and the user's own functions from them."""
