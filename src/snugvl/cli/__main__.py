"""`python -m snugvl.cli` is `snugvl`."""

from snugvl.cli.entry import main

main()
