"""Mistakes that happened in real projects, planted into a rank, each found and named by `keel prove`."""
