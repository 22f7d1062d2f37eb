"""Rows for reinforcement learning: transformed, checked against the trainer's requirements, and written as JSON Lines."""
