"""Run on Flower (`flwr` 1.41)."""
