"""Benches: our side and the peers timed in one process on one GPU."""
