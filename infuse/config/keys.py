"""From the caller's names to canonical keys: sources, aliases, deprecated and unknown names, keys with two values.

Knows no key by name: sections declare their aliases. Checks no value: pydantic does, and its errors are reworded with
the caller's spelling.
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
import reprlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, get_origin

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from infuse.ground import logs
from infuse.ground.errors import ConfigError

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100  # characters: enough for a path or a class name
_NO_NAMES: Mapping[str, str] = MappingProxyType({})


class Section(BaseModel):
    """A frozen group of keys. `aliases`: other name → key; `moved`: deprecated name → dotted key from the root;
    `shorthand`: (type, key) if a value of that type stands for {key: value}.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())
    aliases: ClassVar[Mapping[str, str]] = _NO_NAMES
    moved: ClassVar[Mapping[str, str]] = _NO_NAMES
    shorthand: ClassVar[tuple[type, str] | None] = None
    forms: ClassVar[str] = "a dict"  # all forms, for error texts

    @classmethod
    def expand(cls, value: Any) -> Any:
        """The section as a mapping if `value` is one of its forms, else `value` itself."""
        if isinstance(value, cls):
            return {key: getattr(value, key) for key in value.model_fields_set}
        if cls.shorthand is None:
            return value
        kind, key = cls.shorthand
        if value is None and kind is str:
            return {}
        return {key: value} if isinstance(value, kind) else value


@dataclass(frozen=True)
class Leaf:
    """One value of the caller: the dotted canonical key, and the caller's name for it."""

    key: str
    spelling: str
    value: Any
    deprecated: bool = False


def read(model: type[Section], config: Any, kwargs: Mapping[str, Any]) -> tuple[dict[str, Leaf], list[str]]:
    """The leaves of both sources by canonical key, and all problems with names. Warns once of all deprecated names."""
    problems: list[str] = []
    leaves: dict[str, Leaf] = {}
    for source in (_mapping(config, model), kwargs):
        for leaf in _flatten(model, model, source):
            if isinstance(leaf, str):
                problems.append(leaf)
            elif leaf.key in leaves and not _same(model, leaves[leaf.key], leaf):
                first = leaves[leaf.key]
                problems.append(
                    f"{leaf.key}: has two different values, {first.spelling}={shown(first.value)} and "
                    f"{leaf.spelling}={shown(leaf.value)}; give one"
                )
            elif leaf.key not in leaves or leaf.deprecated:  # a deprecated spelling is the one to warn of
                leaves[leaf.key] = leaf
    deprecated = [f"{leaf.spelling} → {leaf.key}" for leaf in leaves.values() if leaf.deprecated]
    if deprecated:
        text = "deprecated configuration keys and their replacements: " + ", ".join(deprecated)
        logs.warn(text, DeprecationWarning, stacklevel=_frames_inside())
    return leaves, problems


def nested(leaves: Mapping[str, Leaf]) -> dict[str, Any]:
    """The leaves as a nested dict, for pydantic."""
    root: dict[str, Any] = {}
    for leaf in leaves.values():
        *sections, key = leaf.key.split(".")
        target = root
        for section in sections:
            target = target.setdefault(section, {})
        target[key] = leaf.value
    return root


def explain(error: ValidationError, leaves: Mapping[str, Leaf]) -> list[str]:
    """One line for each of pydantic's errors: the key, the value found, the possible ones."""
    lines = []
    for problem in error.errors(include_url=False):
        path = ".".join(str(part) for part in problem["loc"])
        leaf = next((leaf for key, leaf in leaves.items() if path == key or path.startswith(key + ".")), None)
        name = path if leaf is None or leaf.spelling == leaf.key else f"{path} (given as {leaf.spelling})"
        possible = problem["msg"].removeprefix("Value error, ").replace("Input should be", "possible:")
        lines.append(f"{name}: found {shown(problem['input'])}; {possible}")
    return list(dict.fromkeys(lines))


def failure(problems: list[str]) -> ConfigError:
    """The error that lists all problems."""
    if len(problems) == 1:
        return ConfigError(problems[0])
    return ConfigError("\n  ".join((f"{len(problems)} problems in the configuration:", *problems)))


def shown(value: Any) -> str:
    """A value in an error text, shortened."""
    return _SHORT.repr(value)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, in which a key that comes twice has the same value."""
    members: dict[str, Any] = {}
    for key, value in pairs:
        if members.setdefault(key, value) != value:
            raise ValueError(f"{key} has two different values, {shown(members[key])} and {shown(value)}; give one")
    return members


def _mapping(config: Any, model: type[Section]) -> Mapping[str, Any]:
    """The first source (nothing, a dict, the path of a JSON file, or a configuration) as a mapping."""
    if config is None:
        return {}
    config = model.expand(config)
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, (str, os.PathLike)):
        raise ConfigError(
            f"config: found {shown(config)}; possible: a dict, the path of a JSON file, or an {model.__name__}"
        )
    try:
        with open(config, encoding="utf-8") as file:
            loaded = json.load(file, object_pairs_hook=_object)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"config: cannot read {os.fspath(config)!r} as a JSON file: {reason}; possible: a dict, or a path"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"config: {os.fspath(config)!r} is not valid JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"config: {os.fspath(config)!r} holds {shown(loaded)}; possible: a JSON object of keys and values"
        )
    return loaded


def _flatten(
    root: type[Section], section: type[Section], values: Mapping[str, Any], at: str = "", spelt: str = ""
) -> Iterator[Leaf | str]:
    """Each leaf of `values`, or an error text for an unknown name or a value that is no section."""
    for key, value in values.items():
        name, spelling = section.aliases.get(key, key), f"{spelt}{key}"
        if isinstance(value, str) and value == "auto" and name != "replace_method":
            continue  # DeepSpeed: the default
        if name in section.moved:
            yield Leaf(section.moved[name], spelling, _copied(value), deprecated=True)
        elif name not in section.model_fields:
            yield _unknown(root, section, str(key), at, spelling)
        elif (inner := _section_of(section, name)) is None:
            yield Leaf(at + name, spelling, _copied(value))
        elif isinstance(expanded := inner.expand(value), Mapping):
            short = not isinstance(value, (Mapping, Section))  # quant="int8" stands for {"format": "int8"}
            for leaf in _flatten(root, inner, expanded, f"{at}{name}.", f"{spelling}."):
                yield replace(leaf, spelling=spelling) if short and isinstance(leaf, Leaf) else leaf
        else:
            yield f"{spelling}: found {shown(value)}; possible: {inner.forms}"


def _unknown(root: type[Section], section: type[Section], name: str, at: str, spelling: str) -> str:
    """The error text for an unknown name: suggests the same name in another section, else the nearest in this one."""
    elsewhere = [key for key in _all_keys(root) if key.rpartition(".")[2] == name]
    here = [*section.model_fields, *section.aliases, *section.moved]
    nearest = elsewhere[0] if elsewhere else at + difflib.get_close_matches(name, here, n=1, cutoff=0.0)[0]
    return f"{spelling}: unknown key; the nearest known one is {nearest}"


def _all_keys(section: type[Section], at: str = "") -> Iterator[str]:
    for name in section.model_fields:
        inner = _section_of(section, name)
        yield at + name
        if inner is not None:
            yield from _all_keys(inner, f"{at}{name}.")


def _section_of(section: type[Section], name: str) -> type[Section] | None:
    annotation = section.model_fields[name].annotation
    if get_origin(annotation) is not None:  # dict[str, Any], which passes for a class in Python 3.10
        return None
    return annotation if inspect.isclass(annotation) and issubclass(annotation, Section) else None


def _same(root: type[Section], first: Leaf, second: Leaf) -> bool:
    """Whether both leaves of a key have the same value, as "fp16" and torch.float16."""
    if first.value is second.value:
        return True
    section, (*path, name) = root, first.key.split(".")
    for part in path:
        section = _section_of(section, part) or section
    annotation, lenient = section.model_fields[name].rebuild_annotation(), ConfigDict(arbitrary_types_allowed=True)
    adapter: TypeAdapter[Any] = TypeAdapter(annotation, config=lenient)
    try:
        return bool(adapter.validate_python(first.value) == adapter.validate_python(second.value))
    except Exception:  # wrong values, and those whose comparison has no truth value, equal only themselves
        return False


def _copied(value: Any) -> Any:
    """Copy containers deeply, but share their contents: process groups and modules must not be copied."""
    if type(value) is dict:
        return {key: _copied(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(inner) for inner in value)
    return value


def _frames_inside() -> int:
    """The stack level of the first caller outside infuse and pydantic: a warning then points at the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("infuse", "pydantic"):
        level, frame = level + 1, frame.f_back
    return level
