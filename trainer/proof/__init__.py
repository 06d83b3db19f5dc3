"""Proves what a run computed: fingerprints of its steps, chained by hash, and replays of steps that must agree."""
