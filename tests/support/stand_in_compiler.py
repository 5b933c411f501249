"""A stand-in for the C++ compiler, which copies the kernels of this checkout: builds in tests take no minutes."""

from __future__ import annotations

import sys
from pathlib import Path

from infuse.native import BINARY

# Writes what -o names: the kernels of this checkout where it is to link. With BROKEN in its folder it fails like a
# compiler.
COMPILER = f"""#!{sys.executable} -IS
import pathlib, shutil, sys, time
here = pathlib.Path(__file__).parent
if "--version" in sys.argv:
    sys.exit(print("stand-in 1.0"))
if (here / "BROKEN").exists() and "-c" in sys.argv and "binding" in sys.argv[-3]:
    sys.exit("binding.cpp:1:1: error: 'concept' does not name a type")
missing = [word for word in sys.argv[1:] if word.endswith(".cpp") and not pathlib.Path(word).is_file()]
missing += [word for word in sys.argv[1:] if word[:2] in ("-I", "-L") and not pathlib.Path(word[2:]).is_dir()]
if missing:
    sys.exit(f"there is no {{missing}}")
into = pathlib.Path(sys.argv[sys.argv.index("-o") + 1])
if "-shared" in sys.argv:
    time.sleep(0.5)  # as long as it takes the others to come
    with open(here / "linked", "a") as runs:
        runs.write("x")
    shutil.copy({str(BINARY)!r}, into)
else:
    into.touch()
"""


def write_compiler(path: Path) -> Path:
    """Write the stand-in to `path`, in a folder of its own, for CXX to name."""
    path.parent.mkdir()
    path.write_text(COMPILER)
    path.chmod(0o755)
    return path
