"""`python -m windlass`: the command line."""

from windlass.cli.main import main

if __name__ == "__main__":
    main()
