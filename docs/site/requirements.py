"""Print the packages of the extra docs in pyproject.toml: pip would install infuse and PyTorch with them."""

import re
from pathlib import Path

PROJECT = Path(__file__).parents[2] / "pyproject.toml"

if __name__ == "__main__":
    (extra,) = re.findall(r"^docs = \[(.+)\]", PROJECT.read_text(encoding="utf-8"), re.MULTILINE)  # 3.10 has no tomllib
    print(*re.findall(r'"([^"]+)"', extra))
