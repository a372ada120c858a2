"""Run on NVIDIA FLARE: its Collab API, its provisioning, its mutual TLS."""
