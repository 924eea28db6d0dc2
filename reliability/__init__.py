"""The reliability run: everything at random, for minutes or hours, with a report. `python -m reliability --help`."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# On a busy machine idle OpenMP threads that spin slow small ops down by 10 times. Read once, when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.append(str(ROOT / "tests"))  # models, builders and the rule for tolerances are those of the tests
