"""``python -m diffgen``."""

import sys

from diffgen.cli.main import main

sys.exit(main())
