"""The op schemas as csrc/ops.h has them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def schema_texts() -> list[str]:
    """The second string of every entry of `kOps`, its literals joined."""
    text = (ROOT / "csrc" / "ops.h").read_text()
    entries = re.findall(r'\{((?:\s*"[^"]*",?)+)\}', text)
    return ["".join(re.findall(r'"([^"]*)"', entry)[1:]) for entry in entries]
