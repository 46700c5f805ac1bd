#!/usr/bin/env python3
"""Loads an OpenAI-compatible server and shows what its clients would see.

The same as `loomserve bench`, from a checkout: scripts/load_test.py --help lists the options.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from server.bench import command

if __name__ == "__main__":
    sys.exit(command.main(sys.argv[1:], "load_test.py"))
