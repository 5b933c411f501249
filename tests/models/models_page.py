"""Write docs/models.md: what each architecture of transformers, made small, gets from infuse.

    python -m tests.models.models_page [--processes 2] [--json RECORDS.json] [TYPE ...] > docs/models.md

Each model type is tried in a process of its own, so that one that crashes or hangs is one line of the page.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import transformers

import infuse
from infuse.architectures.foreign.plain import linears
from infuse.plan.kinds import ATTENTION, BLOCK, EXPERTS, LINEAR, MODULE
from infuse.plan.plan import Plan
from infuse.reading.trace import NO_LAYER
from infuse.unknown.roles import layer_paths
from tests.models.every_architecture import first_output, model_types, tiny_model
from tests.support.forked import CONTEXT, start

SECONDS = 120  # for one model type: most take less than one
LONGEST_REASON = 100  # characters, for a table that one can read
NO_BLOCK, REFUSED = "not as a whole block: ", "refused: "  # how the plan's reasons begin
WRITTEN, READ, BOTH = "spec", "read", "spec, read"
WHOLE, PARTLY, NOTHING, NOT_MADE = "whole", "partly", "nothing", "not made"
# What a model without blocks gets, by the depth of a step: the first that its plan has.
WITHOUT_BLOCKS = {EXPERTS: "experts", LINEAR: "linears", ATTENTION: "attention"}
MEANINGS = {
    WHOLE: "every repeated layer is one of infuse's blocks, or consists of them",
    PARTLY: "some repeated layers are blocks; in the others, experts and single linears are replaced",
    "experts": "no blocks: the experts of mixtures, and single linears",
    "linears": "no blocks: single linears",
    "attention": "no blocks: only the attention function",
    NOTHING: "nothing is replaced",
}


@dataclass(frozen=True)
class Record:
    """What a model type gets.

    `gets`: a key of MEANINGS, or NOT_MADE. `how`: where its blocks come from. `layers`: how many of its repeated layers
    are blocks, such as "2 of 4". `why`: why not all are, or why the model is not made.
    """

    gets: str
    how: str = ""
    layers: str = ""
    why: str = ""


@dataclass(frozen=True)
class Layer:
    """A repeated layer: its path, the name of its class, and the paths of its plain linears from the model's root."""

    path: str
    name: str
    linears: tuple[str, ...]


def versions() -> str:
    """The libraries that a page depends on."""
    return f"transformers {transformers.__version__} and PyTorch {torch.__version__.partition('+')[0]}"


# ---- one model type ----


def record_of(kind: str) -> Record:
    """Make the tiny model of a type, run it, and say what init_inference replaces in it."""
    torch.manual_seed(0)
    try:
        config, model_class = (getattr(transformers, name) for name in model_types()[kind])
        model = tiny_model(config, model_class).float()
        first_output(copy.deepcopy(model))
    except Exception as problem:
        return Record(NOT_MADE, why=_reason(problem))
    layers = [
        Layer(path, type(layer).__name__, tuple(name for name, _ in linears(layer, path)))
        for path, layer in layer_paths(model).items()
    ]
    try:
        engine = infuse.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=True)
    except Exception as problem:
        return Record(NOT_MADE, why=f"init_inference raises {_reason(problem)}")
    return of_plan(engine.plan, layers)


def of_plan(plan: Plan, layers: Sequence[Layer]) -> Record:
    """Read the record from an executed plan. `layers`: the model's repeated layers before."""
    blocks = {step.path: step for step in plan.steps if step.depth in (BLOCK, MODULE)}
    none = {left.path for left in plan.left if left.why.startswith(NO_BLOCK) and left.why.endswith(NO_LAYER)}
    layers = [layer for layer in layers if layer.path not in none]
    stay = [layer for layer in layers if not all(_inside(linear, blocks) for linear in layer.linears)]
    # `layer_paths` looks for plain linears; Falcon's layers have linears of a class of their own.
    paths = [layer.path for layer in layers]
    count = len(layers) + sum(1 for path in blocks if not _inside(path, paths))
    if blocks:
        gets = PARTLY if stay else WHOLE
    else:
        depths = {step.depth for step in plan.steps}
        gets = next((name for depth, name in WITHOUT_BLOCKS.items() if depth in depths), NOTHING)
    sources = {READ if step.why.startswith("read from") else WRITTEN for step in blocks.values()}
    how = BOTH if len(sources) > 1 else "".join(sources)
    why = _why(plan, stay) if count else "no repeated layers with plain linears"
    return Record(gets, how, f"{count - len(stay)} of {count}", why)


def _why(plan: Plan, stay: Sequence[Layer]) -> str:
    """Why the layers that stay are no blocks: the first of the plan's reasons, or that their classes have no spec."""
    paths = [layer.path for layer in stay]
    for left in plan.left:
        if left.why.startswith((NO_BLOCK, REFUSED)) and _inside(left.path, paths):
            return shortened(left.why.removeprefix(NO_BLOCK))
    return shortened(f"no spec for {', '.join(dict.fromkeys(layer.name for layer in stay))}") if stay else ""


def _inside(path: str, paths: Iterable[str]) -> bool:
    """Whether the module at `path` is one of those at `paths`, or lies in one."""
    return any(path == other or path.startswith(f"{other}.") for other in paths)


def _reason(problem: Exception) -> str:
    """A class and a text of one line; a config's validator hides its own behind a heading."""
    problem = problem.__cause__ if isinstance(problem.__cause__, Exception) else problem
    text = " ".join(str(problem).split())
    return shortened(f"{type(problem).__name__}: {text}")


def shortened(text: str) -> str:
    """At most LONGEST_REASON characters, without the errors that proofs measure: they depend on the processor."""
    text = re.sub(r" by \d\.\de[+-]\d+( of (its|their) size)?", "", " ".join(text.split()))
    return text if len(text) <= LONGEST_REASON else f"{text[: LONGEST_REASON - 1].rstrip()}…"


# ---- all of them ----


def answer(connection: Connection, kind: str) -> None:
    """Send the record of `kind`; what libraries print meanwhile is no part of the page."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    torch.set_num_threads(1)
    connection.send(record_of(kind))


def records(
    kinds: Iterable[str],
    processes: int = 1,
    seconds: float = SECONDS,
    target: Callable[[Connection, str], None] = answer,
) -> dict[str, Record]:
    """Return the record of each type, in order of their names, as `target` sends it from a process for the type.

    Up to `processes` are tried at once; one that takes more than `seconds` is stopped.
    """
    waiting, found = sorted(kinds, reverse=True), {}
    running: dict[Connection, tuple[str, BaseProcess, float]] = {}
    while waiting or running:
        while waiting and len(running) < processes:
            ours, theirs = CONTEXT.Pipe(duplex=False)
            kind = waiting.pop()
            running[ours] = kind, start(target, theirs, kind), time.monotonic() + seconds
            theirs.close()  # so that the end of the process is the end of the pipe
        first_end = min(end for _, _, end in running.values())
        ready = wait(list(running), max(0.0, first_end - time.monotonic()))
        for connection, (kind, process, end) in list(running.items()):
            if connection in ready:
                found[kind] = _received(connection, process)
            elif time.monotonic() >= end:
                found[kind] = Record(NOT_MADE, why=f"takes more than {seconds:.0f} s")
            else:
                continue
            process.kill()
            process.join()
            connection.close()
            del running[connection]
    return dict(sorted(found.items()))


def _received(connection: Connection, process: BaseProcess) -> Record:
    try:
        return connection.recv()
    except EOFError:
        process.join()
        return Record(NOT_MADE, why=f"its process ends with {process.exitcode}")


# ---- the page ----

LINEAGES = Path(__file__).with_name("lineages.md")  # written by hand: which families are tested, by lineage
HEAD = """\
# What each model gets

{made} of the {all} model types of {versions} can be made small and run on random inputs.
This is what `infuse.init_inference(model, dtype=torch.float32)` replaces in them on a CPU, after its proofs:

| gets | types | share | spec | read | both | |
|---|---|---|---|---|---|---|
{shares}

Before layers were read from their graphs, 74 of the 311 types that could be run then were whole (24 %); before latent
attention, packed towers, layer scale and what Gemma 4, MPNet and DeBERTa need were parts, 149 of 312 (48 %).

`spec`: the blocks have a written spec. `read`: they were read from their layers' graphs. Repeated layers are the
members of a model's lists of layers, in all of its parts: text, pictures, sound, encoder and decoder. A member without
attention that returns other sizes than it takes, such as a merger of patches, is none: its linears are replaced like
those outside of layers. Of the models of a type, the first of these is taken: for causal language modelling, for
generation from text, from sound or from several inputs, the plain one.

`python -m tests.models.models_page > docs/models.md` writes this page.

{lineages}
## Model types

| model type | gets | how | why not whole |
|---|---|---|---|
{rows}

## Not made small

The sizes in these configs are not found by their names, or the models do not run on random tokens, pixels or sound
alone, or they need packages that were not installed. `infuse.plan(model)` says what yours gets.

| model type | why |
|---|---|
{away}
"""


def page(found: Mapping[str, Record]) -> str:
    made = [record for record in found.values() if record.gets != NOT_MADE]
    rows = {kind: row(kind, record) for kind, record in found.items()}
    return HEAD.format(
        made=len(made),
        all=len(found),
        versions=versions(),
        lineages=LINEAGES.read_text(encoding="utf-8"),
        shares="\n".join(_shares(made)),
        rows="\n".join(rows[kind] for kind, record in found.items() if record.gets != NOT_MADE),
        away="\n".join(rows[kind] for kind, record in found.items() if record.gets == NOT_MADE),
    )


def _shares(made: Sequence[Record]) -> Iterator[str]:
    for gets, meaning in MEANINGS.items():
        hows = Counter(record.how for record in made if record.gets == gets)
        if hows:
            sources = [str(hows[how]) if gets in (WHOLE, PARTLY) else "" for how in (WRITTEN, READ, BOTH)]
            yield _line(gets, str(hows.total()), f"{100 * hows.total() / len(made):.0f} %", *sources, meaning)


def row(kind: str, record: Record) -> str:
    """The page's line for a model type."""
    if record.gets == NOT_MADE:
        return _line(f"`{kind}`", _escaped(record.why))
    gets = f"{PARTLY}: {record.layers} layers" if record.gets == PARTLY else record.gets
    return _line(f"`{kind}`", gets, record.how, _escaped(record.why))


def _line(*cells: str) -> str:
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"


def _escaped(text: str) -> str:
    """Text for a cell of a table in Markdown; an underscore between letters or digits is one already."""
    return re.sub(r"[\\`*<|]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", text)


def records_text(found: Mapping[str, Record]) -> str:
    """JSON with a line for each type, so that two runs can be compared by diff."""
    lines = (f"{json.dumps(kind)}: {json.dumps(asdict(record), ensure_ascii=False)}" for kind, record in found.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.models.models_page", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("types", nargs="*", metavar="TYPE", help="model types; all that transformers knows if none")
    parser.add_argument("--processes", type=int, default=1, help="how many types are tried at once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the records to this file, as JSON")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.types) - model_types().keys()):
        parser.error(f"transformers has no model type {', '.join(unknown)}")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}  # of the processes
    found = records(options.types or model_types(), options.processes)
    if options.json:
        options.json.write_text(records_text(found), encoding="utf-8")
    sys.stdout.write(page(found))


if __name__ == "__main__":
    main(sys.argv[1:])
