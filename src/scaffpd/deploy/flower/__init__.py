"""The Flower engine (`flwr` 1.41): everything that knows Flower is in this folder."""
