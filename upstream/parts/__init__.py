"""The three parts of the change, each of which can be applied alone."""
