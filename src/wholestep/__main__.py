"""`python -m wholestep` is the command line."""

from wholestep.cli import main

main()
