"""`python -m cli`, the same as `evenflow`."""

from cli.main import main

if __name__ == "__main__":
    main(prog_name="evenflow")
