"""Fingerprints of a run's steps; `keel replay` compares them with those of the steps computed again."""
