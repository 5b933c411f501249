"""The rules of the house, read from the source: who imports whom, what stays small, what must not be there."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HOUSE = ROOT / "infuse"

# Module or package → level. A file config_keys.py belongs to config; a module of a package has its package's level.
LEVELS = {
    "errors": 0, "interrupts": 0, "device": 0, "logs": 0, "pages": 0,
    "quant": 1, "parallel": 1, "runtime.graph": 1, "runtime.capture": 1, "runtime.signature": 1,
    "ops": 2,
    "spec": 3, "runtime.probe": 3, "runtime.profile": 3, "parallel.collectives": 3, "parallel.shared_memory": 3, "parallel.join": 3,
    "layers": 4, "weights": 4,
    "config": 5,
    "plan": 6,
    "in_dtype": 0, "verify": 7, "apply": 7, "saved": 7, "load": 7,
    "runtime.choose": 8, "runtime.bucket": 8, "runtime.buckets": 8, "runtime.device_loop": 8, "runtime.loop": 8, "runtime.decode": 8,
    "runtime.forward": 8, "runtime.continuous": 8,
    "runtime.agreement": 8, "runtime.lent": 8, "runtime.together": 8, "runtime.straight": 8, "runtime.course": 1,
    "engine": 8,
    "__init__": 9, "deepspeed": 9, "cli": 9,
}
# The imports between different rooms of one level: (who, whom).
NEIGHBOURS = {
    ("apply", "verify"), ("apply", "saved"), ("load", "apply"), ("load", "saved"), ("engine", "runtime.decode"),
    ("deepspeed", "__init__"), ("cli", "__init__"), ("device", "errors"),
}
# The files that may import transformers. Each one more is one more to look at with every release of transformers.
TRANSFORMERS = {
    "cli.py", "cli_folder.py", "engine.py", "layers/cache.py", "layers/hook.py", "runtime/agreement.py", "runtime/choose.py",
    "runtime/decode.py", "runtime/loop.py", "runtime/straight.py", "verify.py", "weights/names.py",
}
LONGEST_FILE, LONGEST_FUNCTION = 600, 60  # a file holds one idea; a longer one is worth a look
NAMES_OF_NOTHING = {"utils", "util", "helpers", "helper", "common", "base", "misc"}

FILES = sorted(HOUSE.rglob("*.py"))
MODULES = {".".join(path.relative_to(HOUSE).with_suffix("").parts).removesuffix(".__init__") for path in FILES}


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def module_of(path: Path) -> str:
    """The name below infuse: "ops.norm", "ops" for its __init__, "__init__" for infuse's own."""
    return ".".join(path.relative_to(HOUSE).with_suffix("").parts).removesuffix(".__init__")


def key_of(module: str) -> str | None:
    """The key of LEVELS that covers a module; of runtime, only its modules have levels."""
    parts = module.split(".")
    names = [".".join(parts[:2]), parts[0], parts[0].partition("_")[0] if not module.startswith("_") else module]
    return next((name for name in names if name in LEVELS), None)


def room_of(module: str) -> str:
    return module.split(".")[0].partition("_")[0] if not module.startswith("_") else module


def imported(path: Path) -> Iterator[str]:
    """Every absolute name that a file imports, at any depth: "torch.nn", "infuse.ops.norm", relative ones resolved."""
    package = ["infuse", *path.relative_to(HOUSE).parent.parts]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{source}.{name.name}" for name in node.names)


def imported_modules(path: Path) -> Iterator[str]:
    """The modules of the house that a file imports, named as `module_of` names them."""
    for name in imported(path):
        if name == "infuse" or name.startswith("infuse."):
            parts = name.split(".")[1:]
            while parts and ".".join(parts) not in MODULES:  # the last part is a class, a function, ...
                parts.pop()
            yield ".".join(parts) or "__init__"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_go_downwards(path):
    importer = module_of(path)
    if importer == "runtime":
        assert not list(imported_modules(path)), "runtime/__init__.py has no level: it must import nothing of the house"
        return
    assert key_of(importer), f"give {importer} a level in LEVELS"
    for target in imported_modules(path):
        if target == importer:
            continue
        upper, lower = key_of(importer), key_of(target)
        assert lower, f"{importer} imports {target}, which has no level"
        same = room_of(importer) == room_of(target) and LEVELS[upper] == LEVELS[lower]
        allowed = LEVELS[lower] < LEVELS[upper] or same or (upper, lower) in NEIGHBOURS
        assert allowed, f"{importer} (level {LEVELS[upper]}) imports {target} (level {LEVELS[lower]})"


def test_the_resolution_of_imports():
    """The test above judges what `imported_modules` finds: on these files that is known."""
    assert {"config_keys", "config_values", "device", "errors"} <= set(imported_modules(HOUSE / "config.py"))
    assert "__init__" in set(imported_modules(HOUSE / "cli.py"))
    assert "ops.op" in set(imported_modules(HOUSE / "ops" / "norm.py"))
    assert (key_of("ops.cpu.linear"), key_of("config_keys"), key_of("runtime"), key_of("__init__")) == ("ops", "config", None, "__init__")


def test_transformers_is_imported_in_few_files():
    found = {path.relative_to(HOUSE).as_posix() for path in FILES if any(_is(name, "transformers") for name in imported(path))}
    assert found <= TRANSFORMERS


def test_importing_infuse_is_light():
    """No kernel compiler, no diffusers, no modelling of transformers (seconds), no device: they are for those who use them."""
    code = "\n".join((
        "import sys, torch",
        "sys.modules['triton'] = None",  # whoever imports it fails; transformers and torch take it as not installed, and so must we
        "before = set(sys.modules)",  # what torch itself imports is not our affair
        "import infuse",
        "new = set(sys.modules) - before",
        "heavy = ('diffusers.', 'infuse.ops.triton.kernels', 'transformers.modeling_utils')",
        "assert not [name for name in new if name.startswith(heavy)], 'heavy import'",
        "assert not torch.cuda.is_initialized(), 'a device was touched'",
    ))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_triton_and_diffusers_are_imported_only_when_used():
    """At the top of a file they may stand only in ops/triton/kernels/, which other files do not import at their top."""
    for path in FILES:
        if path.relative_to(HOUSE).parts[:3] == ("ops", "triton", "kernels"):
            continue
        top = [node for node in tree(path).body if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = {name.name for node in top for name in node.names} | {node.module or "" for node in top if isinstance(node, ast.ImportFrom)}
        heavy = [name for name in names if any(_is(name, heavy) for heavy in ("triton", "diffusers", "infuse.ops.triton.kernels"))]
        assert not heavy, f"{path.name} imports {heavy} at its top"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_sizes(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= LONGEST_FILE, f"{lines} lines: split it"
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= LONGEST_FUNCTION, f"{node.name}: {length} lines: split it"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_library_code_neither_prints_nor_exits(path):
    if path == HOUSE / "cli.py":
        return
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in {"print", "exit", "quit", "sys.exit", "os._exit"}, f"line {node.lineno}: {called}()"


def test_names_say_something():
    files = [path for folder in ("infuse", "tests", "bench", "examples") for path in (ROOT / folder).rglob("*.py")]
    words = {part.removesuffix(".py") for path in files for part in path.relative_to(ROOT).parts}
    assert not words & NAMES_OF_NOTHING


def _is(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")
