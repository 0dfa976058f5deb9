"""`python -m undertow`, as torchrun starts it: the `undertow` command."""

import sys

from undertow.cli.main import main

sys.exit(main())
