"""`python -m wan_core`, or `python FOLDER/wan_core` in any folder and without an installation."""

import sys
from pathlib import Path

if __name__ == "__main__":
    if not __package__:  # started by the folder's path, which Python put first in `sys.path`
        sys.path[0] = str(Path(__file__).resolve().parents[1])
    from wan_core.cli import main

    sys.exit(main())
