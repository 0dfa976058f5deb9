"""Recurrence in depth: a block of layers that runs several times for each token."""
