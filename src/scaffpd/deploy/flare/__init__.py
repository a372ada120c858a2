"""NVIDIA FLARE carries the questions: its Collab API, its provisioning, its mutual TLS."""
