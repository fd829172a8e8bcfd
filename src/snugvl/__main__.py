"""`python -m snugvl` is `snugvl`."""

from snugvl.cli.entry import main

main()
