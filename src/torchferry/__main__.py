"""`python -m torchferry`: the same as the `torchferry` command."""

from torchferry.cli import main

if __name__ == "__main__":
    main()
