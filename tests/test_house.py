"""The rules of the house, read from the source: who imports whom, what stays small, what must not be there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HOUSE, COMMANDS, TESTS = ROOT / "infuse", ROOT / "infuse_cli", ROOT / "tests"
MAP = ROOT / "docs" / "map.md"

# Each room has one level: a module imports from lower levels and from its own room; those of the ground floor also from
# each other.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("ground", "native"),
    ("quant", "parallel", "inputs"),
    ("ops", "config", "architectures"),
    ("cache",),
    ("layers", "weights", "reading", "unknown", "profile"),
    ("diffusion",),
    ("plan", "graphs"),
    ("proof", "shards", "generate"),
    ("apply",),
    ("engine",),
    ("__init__", "deepspeed"),
)
LEVELS = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
# The files that may import transformers. Each one more is one more to look at with every release of transformers.
TRANSFORMERS = {
    "cache/kv_cache.py", "cache/slot.py", "cache/encoded_slot.py", "cache/recurrence_slot.py", "cache/hybrid_slot.py",
    "cache/shown_states.py", "layers/attention/hook.py",
    "graphs/held_states.py", "generate/same_inputs.py", "generate/candidates.py",
    "generate/choose.py",
    "generate/install.py", "generate/pairs/cache.py", "generate/loop.py", "generate/speculation.py", "proof/cases.py",
    "proof/sessions.py",
    "reading/calls.py", "reading/trace.py", "weights/names.py",
}  # fmt: skip
# What takes a second and more to import, beside PyTorch.
HEAVY = (
    "torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes", "sympy", "triton", "diffusers", "rich",
    "typer", "scipy", "sklearn", "pandas", "accelerate", "peft", "tokenizers",
    "transformers.modeling_utils", "transformers.models", "transformers.generation.utils", "infuse.ops.triton.kernels",
)  # fmt: skip
# Whose modules are imported beyond those of PyTorch and of transformers' caches.
OURS = {
    "infuse", "torch", "transformers", "pydantic", "pydantic_core", "annotated_types", "typing_inspection",
    "safetensors", "filelock", "isal", "tqdm", "regex",
}  # fmt: skip
LONGEST_FILE, LONGEST_FUNCTION = 600, 60  # a file holds one idea; a longer one is worth a look
NAMES_OF_NOTHING = {"utils", "util", "helpers", "helper", "common", "base", "misc"}

FILES = sorted(HOUSE.rglob("*.py"))
ALL_FILES = [*FILES, *sorted(COMMANDS.glob("*.py"))]
MODULES = {".".join(path.relative_to(HOUSE).with_suffix("").parts).removesuffix(".__init__") for path in FILES}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def module_of(path: Path) -> str:
    """The name below infuse: "ops.norm", "ops" for its __init__, "__init__" for infuse's own."""
    return ".".join(path.relative_to(HOUSE).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str:
    return module.partition(".")[0]


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


def test_imports_go_downwards() -> None:
    for path in FILES:
        importer = module_of(path)
        assert room_of(importer) in LEVELS, f"give {room_of(importer)} a floor"
        for target in imported_modules(path):
            upper, lower = room_of(importer), room_of(target)
            ground = LEVELS[lower] == LEVELS[upper] == 0
            face = LEVELS[upper] == len(FLOORS) - 1 and lower == "__init__"
            allowed = LEVELS[lower] < LEVELS[upper] or upper == lower or ground or face
            assert allowed, f"{importer} (level {LEVELS[upper]}) imports {target} (level {LEVELS[lower]})"


def test_there_are_no_circles() -> None:
    """Also none inside a room, and none that only type checkers or functions see."""
    below = {module_of(path): set(imported_modules(path)) - {module_of(path)} for path in FILES}
    while free := [module for module, targets in below.items() if not targets & below.keys()]:
        for module in free:
            del below[module]
    assert not below, f"circles among {sorted(below)}"


def test_only_loading_knows_shards() -> None:
    """Modules are built and proven alike wherever their values come from."""
    importers = {module_of(path) for path in FILES if any(room_of(one) == "shards" for one in imported_modules(path))}
    assert {module for module in importers if room_of(module) == "apply"} == {"apply.load"}


def test_no_files_share_a_prefix() -> None:
    """plan_text.py beside plan.py would be a folder that is not there."""
    for path in FILES:
        first = path.stem.partition("_")[0]
        assert path.stem == first or not (path.parent / f"{first}.py").exists(), (
            f"{path} belongs into a folder {first}/"
        )


def test_the_resolution_of_imports() -> None:
    """The tests above judge what `imported_modules` finds: on these files that is known."""
    assert {"config.keys", "config.values", "ground.device", "ground.errors"} <= set(
        imported_modules(HOUSE / "config" / "inference.py")
    )
    assert "engine" in set(imported_modules(HOUSE / "__init__.py"))
    assert "ops.op" in set(imported_modules(HOUSE / "ops" / "norm.py"))


def test_no_test_imports_from_another() -> None:
    """Tests share what is in tests/support and tests/models. In tests/ itself are only the tests of the whole house."""
    for path in TESTS.rglob("*.py"):
        wrong = re.findall(r"^ *(?:from|import) .*\btest_\w+", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert not wrong, f"{path}: {wrong}: what tests share belongs into tests/support or tests/models"
    assert {path.name for path in TESTS.glob("*.py")} == {"__init__.py", "conftest.py", "test_house.py"}


def test_transformers_is_imported_in_few_files():
    found = {
        path.relative_to(HOUSE).as_posix()
        for path in FILES
        if any(_is(name, "transformers") for name in imported(path))
    }
    assert found <= TRANSFORMERS


def test_importing_infuse_is_light() -> None:
    """No compiler, no diffusers, no models of transformers (seconds), no device: they are for those who use them."""
    code = "\n".join(
        (
            "import sys, torch",
            "of_torch = set(sys.modules)",
            "import transformers.cache_utils",
            "before = set(sys.modules)",
            "import infuse",
            "import gc; assert gc.isenabled(), 'it was on before'",
            "print(*set(sys.modules) - before, torch.cuda.is_initialized())",
            "print(*set(sys.modules) - of_torch)",
        )
    )
    first, second = _python(code).splitlines()
    *new, touched = first.split()
    assert not (heavy := [name for name in second.split() if any(_is(name, one) for one in HEAVY)]), heavy
    packages = {name.partition(".")[0] for name in new} - sys.stdlib_module_names
    assert (others := {name for name in packages - OURS if not name.startswith("_")}) == set(), others
    assert touched == "False", "a device was touched"


def test_importing_infuse_leaves_the_garbage_collector_as_it_was() -> None:
    assert _python("import gc; gc.disable(); import infuse; print(gc.isenabled())") == "False\n"


@pytest.mark.parametrize("arguments", ["--help", "--version", "generate --help", "plan nowhere", "bank"])
def test_the_command_line_answers_without_pytorch(arguments: str) -> None:
    code = "\n".join(
        (
            "import sys",
            f"sys.argv = ['infuse', *{arguments.split()}]",
            "from infuse_cli.app import app",
            "try:",
            "    app()",
            "finally:",
            "    print({'torch', 'infuse', 'transformers', 'numpy'} & set(sys.modules), file=sys.__stderr__)",
        )
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stderr.endswith("set()\n"), done.stderr
    assert done.returncode == (2 if arguments in ("plan nowhere", "bank") else 0)


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_triton_and_diffusers_are_imported_only_when_used():
    """At the top of a file they may stand only in ops/triton/kernels/, which other files do not import at their top."""
    for path in FILES:
        if path.relative_to(HOUSE).parts[:3] == ("ops", "triton", "kernels"):
            continue
        top = [node for node in tree(path).body if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = {name.name for node in top for name in node.names} | {
            node.module or "" for node in top if isinstance(node, ast.ImportFrom)
        }
        heavy = [
            name
            for name in names
            if any(_is(name, heavy) for heavy in ("triton", "diffusers", "infuse.ops.triton.kernels"))
        ]
        assert not heavy, f"{path.name} imports {heavy} at its top"


def test_files_and_functions_are_short_and_neither_print_nor_exit() -> None:
    for path in ALL_FILES:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= LONGEST_FILE, f"{path}: {lines} lines: split it"
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                assert length <= LONGEST_FUNCTION, f"{path}: {node.name}: {length} lines: split it"
            if isinstance(node, ast.Call) and path != COMMANDS / "app.py":
                called = ast.unparse(node.func)
                assert called not in {"print", "exit", "quit", "sys.exit", "os._exit"}, f"{path}:{node.lineno}"


def test_names_say_something():
    files = [
        path
        for folder in ("infuse", "infuse_cli", "tests", "bench", "examples")
        for path in (ROOT / folder).rglob("*.py")
    ]
    words = {part.removesuffix(".py") for path in files for part in path.relative_to(ROOT).parts}
    assert not words & NAMES_OF_NOTHING


def test_the_map_answers_its_questions() -> None:
    """Each answer of docs/map.md names a file, and a class, function or table that stands at its top level."""
    answers = re.findall(r"^\| [^|]+\? \| `([\w/.]+)` \| `(\w+)` \|$", MAP.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(answers) == 13
    for file, name in answers:
        defined = {
            target.id
            for node in tree(HOUSE / file).body
            for target in (node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)])
            if isinstance(target, ast.Name)
        } | {node.name for node in tree(HOUSE / file).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        assert name in defined, f"{file} has no {name}"


def test_the_map_has_every_room_on_its_floor() -> None:
    text = MAP.read_text(encoding="utf-8")
    rows = re.findall(r"^\| ?(\d*) \| ((?:`\w+/?` ?)+)\|", text, re.MULTILINE)
    floors: list[list[str]] = []
    for number, rooms in rows:
        if number:
            floors.append([])
        floors[-1] += [room.rstrip("/") for room in re.findall(r"`(\w+/?)`", rooms)]
    assert [set(floor) for floor in floors] == [set(floor) for floor in FLOORS]
    assert len(text.splitlines()) <= 110, "the map has two pages"


def _is(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")
