"""`python -m decoded`."""

import sys

from decoded.cli import main

if __name__ == "__main__":
    sys.exit(main())
