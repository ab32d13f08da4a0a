"""`python -m wan_core`."""

import sys

from wan_core.cli import main

if __name__ == "__main__":
    sys.exit(main())
