"""The page of `keel report`: what a run folder holds, what it says in words, its curves, and the HTML around them."""
