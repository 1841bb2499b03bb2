"""One module per verb of the command line: its configuration, its function, its result."""
