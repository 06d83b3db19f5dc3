"""The optimizers: a file each, with the class `Rule` that says what it keeps of a parameter and how it updates it."""
