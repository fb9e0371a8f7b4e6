"""`python -m paged.cli`, for where the script `paged` is not on the path."""

import sys

from paged.cli import main

sys.exit(main())
