"""`python -m scaffpd` is the `scaffpd` command, for machines where nothing can be installed."""

from scaffpd.cli import main

main()
