"""`python -m snugvl.cli` is `snugvl`."""

from snugvl.cli.app import main

main()
