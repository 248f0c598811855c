"""The command line: reads arguments, prints results and sets exit codes, and nothing else does."""
