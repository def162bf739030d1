"""`python -m zero_plugin` is the command `zero-plugin`."""

from zero_plugin.cli.main import main

main()
