"""What `keel prove` is made of: the small job, the techniques and their pairs, the comparison, the report."""
