"""`python -m anyrig`."""

from anyrig.cli.main import main

main()
