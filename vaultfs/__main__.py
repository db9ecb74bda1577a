"""``python -m vaultfs`` is the ``vaultfs`` command."""

import sys

from vaultfs.cli.main import main

sys.exit(main())
