"""What callers pass to functions of the API as objects of Python, read as requests."""
