"""The worlds of processes are those of tests/dist/parameters."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "dist" / "parameters"))
