"""`python tools/aiter_triton`: the folder as a command, from wherever it lies."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)
from aiter_triton.command import main  # noqa: E402

sys.exit(main())
