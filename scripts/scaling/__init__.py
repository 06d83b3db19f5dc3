"""What `keel ladder` computes: the smaller runs, and the law that their losses follow."""
