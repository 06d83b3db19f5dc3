"""What `keel coordinates` measures: jobs at other widths, their activations and losses, and pictures of them."""
