"""The tensors of GGUF files under the names that transformers' checkpoints of the same models have.

A family says how its tensors are called and what llama.cpp did to them: rows of q and k permuted per head, norms stored
plus 1, experts stacked. Here that is undone, lazily. Tensors without a name keep their own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from infuse.ground.errors import CheckpointError
from infuse.weights.gguf.changes import Sizes, Unlike
from infuse.weights.gguf.families import TOP, Family, Join, family_of
from infuse.weights.gguf.file import PLAIN, Entry, GGUFFile
from infuse.weights.gguf.metadata import DEFAULT_BASE, model_layers
from infuse.weights.gguf.tensors import Alternating, Frequencies, Shifted, Unpermuted, Viewed, matrix
from infuse.weights.lazy import FileTensor, Joined, LazyTensor, Stacked, Transposed

Named = Iterator[tuple[str, LazyTensor]]

FREQUENCIES = "model.rotary_emb.inv_freq"  # the rotary frequencies of a file that scales them one by one
_NAME = re.compile(r"(?:blk\.([0-9]{1,6})\.)?(.+?)(\.weight|\.bias|\.scale)?", re.DOTALL)


def named_tensors(files: tuple[GGUFFile, ...]) -> dict[str, LazyTensor]:
    """The tensors of one model's files, the first of which holds the key-values, by transformers' names.

    CheckpointError names those that cannot be what their names say.
    """
    architecture, family = family_of(files[0].values, files[0].path)
    namer = _Namer(architecture, family, files)
    tensors: dict[str, LazyTensor] = {}
    for name, tensor in namer.all():
        if name in tensors:
            raise CheckpointError(f"{files[0].path}: two tensors map to {name}")
        tensors[name] = tensor
    namer.raise_any()
    return tensors


@dataclass
class _Namer:
    architecture: str
    family: Family
    files: tuple[GGUFFile, ...]
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.held = {name: file for file in self.files for name in file.entries}
        self.layers = model_layers(self.files[0].values, self.architecture)

    def all(self) -> Named:
        for name, file in self.held.items():
            entry = file.entries[name]
            try:
                yield from self._named(name, file, entry)
            except Unlike as error:
                self.faults.append(f"{name} in {file.path.name}: {error}")

    def raise_any(self) -> None:
        if self.faults:
            raise CheckpointError(f"{self.files[0].path}: {len(self.faults)} tensors: {'; '.join(self.faults)}")

    def _named(self, name: str, file: GGUFFile, entry: Entry) -> Named:
        matched = _NAME.fullmatch(name)
        if matched is None:
            raise Unlike("has no name")
        layer, leaf, kind = matched[1], matched[2], matched[3] or ""
        if kind == ".scale" and self._is_factor(name):
            return
        if layer is None:
            if leaf == "rope_freqs":
                if self.architecture == "gemma4":  # of some layers only; the config says it
                    return
                yield FREQUENCIES, self._frequencies(matrix(file, name))
                return
            names = {**TOP, **self.family.top}
            yield f"{names.get(leaf, leaf)}{kind}", self._values(name, file, entry)
            return
        if int(layer) >= self.layers:
            return
        within = f"model.layers.{layer}"
        if f"{leaf}{kind}" in self.family.layer:
            path = self.family.layer[f"{leaf}{kind}"]
            yield f"{within}.{path}", self._values(name, file, entry, f"{leaf}{kind}", int(layer))
        elif matched_experts := re.fullmatch(r"ffn_(gate|up|down|gate_up)_exps", leaf):
            yield from self._experts(name, file, entry, within, matched_experts[1], kind)
        elif leaf in self.family.by_head:
            yield from self._heads_of(name, file, entry, f"{within}.{self.family.by_head[leaf]}{kind}")
        elif join := next((one for one in self.family.joins if f"{leaf}{kind}" in one.parts), None):
            yield from self._joined(join, f"blk.{layer}", within, f"{leaf}{kind}")
        elif leaf in self.family.layer:
            yield f"{within}.{self.family.layer[leaf]}{kind}", self._values(name, file, entry, leaf, int(layer))
        else:  # belongs to a layer, and the model has no such part
            yield f"{within}.{leaf}{kind}", self._values(name, file, entry)

    def _joined(self, join: Join, place: str, within: str, part: str) -> Named:
        """Yield the tensor that is made of several, once, if the file has it in parts only."""
        if f"{place}.{join.unless}" in self.held:
            return
        names = [f"{place}.{one}" for one in join.parts]
        if absent := [name for name in names if name not in self.held]:
            raise Unlike(f"{', '.join(absent)} is not there")
        if part == join.parts[0]:
            tensors = [matrix(self.held[name], name, factor=self._factor(name)) for name in names]
            yield f"{within}.{join.name}", join.join(tensors, self._sizes(names[0]))

    def _sizes(self, name: str) -> Sizes:
        return Sizes(self.files[0].values, self.architecture, f"{name} in {self.held[name].path}")

    def _heads_of(self, name: str, file: GGUFFile, entry: Entry, path: str) -> Named:
        """Yield the tensors of each head."""
        if len(entry.shape) != 2 or entry.type not in PLAIN:
            raise Unlike(f"{entry.shape} in {entry.type}, not a row for each head")
        for head in range(entry.shape[0]):
            yield path.format(head), Viewed(matrix(file, name), entry.shape, head)

    def _values(self, name: str, file: GGUFFile, entry: Entry, leaf: str = "", layer: int = 0) -> LazyTensor:
        wrap: Callable[[LazyTensor], LazyTensor] = lambda tensor: tensor  # noqa: E731
        if self.family.permuted and leaf in ("attn_q", "attn_k"):
            heads = self._heads("head_count" if leaf == "attn_q" else "head_count_kv", layer)
            if heads < 1 or entry.shape[0] % (2 * heads):
                raise Unlike(f"{entry.shape[0]} rows are not {heads} heads of even width")
            wrap = lambda tensor: Unpermuted(tensor, heads)  # noqa: E731
        elif self.family.shifted and name.endswith("norm.weight") and leaf not in self.family.changes:
            if entry.type not in PLAIN:
                raise Unlike(f"a norm in {entry.type}")
            wrap = lambda tensor: Shifted(tensor, -1.0)  # noqa: E731
        tensor = matrix(file, name, wrap, factor=self._factor(name))
        if change := self.family.changes.get(_in_layer(name), self.family.changes.get(leaf)):
            return change(tensor, self._sizes(name))
        if leaf == "ffn_gate_inp_shexp" and len(entry.shape) == 1:
            return Viewed(tensor, (1, *entry.shape))
        return tensor

    def _experts(self, name: str, file: GGUFFile, entry: Entry, within: str, leaf: str, kind: str) -> Named:
        """Yield the tensors of a layer's experts, each alone, or `in_one`."""
        axes = {".weight": 3, ".bias": 2 if self.family.in_one else 0}.get(kind)
        if not self.family.experts or len(entry.shape) != axes:
            raise Unlike(f"{entry.shape} are no experts of {self.architecture}")
        if self.family.in_one:
            yield from self._in_one(name, file, within, leaf, kind)
            return
        if self.family.stacked:
            yield from self._stacked(name, within, leaf)
            return
        count, rows, _ = entry.shape
        leaves = ("gate", "up") if leaf == "gate_up" else (leaf,)
        rows //= len(leaves)
        paths = dict(zip(("gate", "up", "down"), self.family.experts, strict=True))
        for expert in range(count):
            for place, one in enumerate(leaves):
                start = (expert * len(leaves) + place) * rows
                tensor = matrix(file, name, rows=slice(start, start + rows), factor=self._factor(name, expert))
                yield f"{within}.{paths[one].format(expert)}{kind}", tensor

    def _in_one(self, name: str, file: GGUFFile, within: str, leaf: str, kind: str) -> Named:
        """Yield gate and up, which alternate, or down, as a tensor [experts, inputs, rows]; biases [experts, rows]."""
        gate_up, down = self.family.experts
        suffix = "_bias" if kind == ".bias" else ""
        if leaf == "down":
            tensor = Stacked(self._matrices(name)) if kind == ".weight" else matrix(file, name)
            yield f"{within}.{down}{suffix}", Transposed(tensor) if kind == ".weight" else tensor
            return
        gate, up = self._gate_and_up(name, leaf)
        if leaf == "up":
            return
        if kind == ".bias":
            both = [Transposed(matrix(self.held[one], one)) for one in (gate, up)]
            yield f"{within}.{gate_up}{suffix}", Transposed(Alternating(*both))
            return
        pairs = zip(self._matrices(gate), self._matrices(up), strict=True)
        yield f"{within}.{gate_up}", Transposed(Stacked([Alternating(*pair) for pair in pairs]))

    def _stacked(self, name: str, within: str, leaf: str) -> Named:
        """Yield gate and up, one below the other, or down, as a tensor [experts, rows, inputs]."""
        gate_up, down = self.family.experts
        if leaf in ("down", "gate_up"):
            yield f"{within}.{down if leaf == 'down' else gate_up}", Stacked(self._matrices(name))
            return
        gate, up = self._gate_and_up(name, leaf)
        if leaf == "gate":
            pairs = zip(self._matrices(gate), self._matrices(up), strict=True)
            yield f"{within}.{gate_up}", Stacked([Joined.of(dict(enumerate(pair))) for pair in pairs])

    def _gate_and_up(self, name: str, leaf: str) -> tuple[str, str]:
        """The names of both, of which `name` is one; they must be there, and have one shape."""
        gate, up = (name.replace(f"ffn_{leaf}_exps", f"ffn_{one}_exps") for one in ("gate", "up"))
        if absent := [one for one in (gate, up) if one not in self.held]:
            raise Unlike(f"{', '.join(absent)} is not there")
        shapes = {self.held[one].entries[one].shape for one in (gate, up)}
        if len(shapes) > 1:
            raise Unlike(f"gate and up are {' and '.join(map(str, sorted(shapes)))}")
        return gate, up

    def _matrices(self, name: str) -> list[LazyTensor]:
        """The matrix of each expert."""
        file = self.held[name]
        count, rows, _ = file.entries[name].shape
        spans = (slice(expert * rows, (expert + 1) * rows) for expert in range(count))
        return [matrix(file, name, rows=span, factor=self._factor(name, expert)) for expert, span in enumerate(spans)]

    def _factor(self, name: str, place: int = 0) -> LazyTensor | None:
        """The number that a whole matrix in NVFP4 is multiplied by, if the file has one."""
        scale = name.removesuffix(".weight") + ".scale"
        if scale not in self.held or self.held[name].entries[name].type != "NVFP4":
            return None
        entry = self.held[scale].entries[scale]
        if entry.type != "F32" or len(entry.shape) > 1 or place >= math.prod(entry.shape):
            raise Unlike(f"{scale} is {entry.type} {entry.shape}, not a number in F32")
        return Viewed(FileTensor(self.held[scale], scale), (math.prod(entry.shape), 1), place)

    def _is_factor(self, name: str) -> bool:
        weight = name.removesuffix(".scale") + ".weight"
        return weight in self.held and self.held[weight].entries[weight].type == "NVFP4"

    def _frequencies(self, factors: LazyTensor) -> LazyTensor:
        base = self.files[0].values.get(f"{self.architecture}.rope.freq_base", DEFAULT_BASE)
        context = self.files[0].values.get(f"{self.architecture}.context_length", 0)
        if not isinstance(base, float) or not base > 0 or len(factors.shape) != 1 or not isinstance(context, int):
            raise Unlike(f"{factors.shape} are no factors of frequencies to base {base!r:.40}")
        return Frequencies(factors, base, context)

    def _heads(self, key: str, layer: int) -> int:
        value = self.files[0].values.get(f"{self.architecture}.attention.{key}")
        if value is None and key == "head_count_kv":
            return self._heads("head_count", layer)
        if isinstance(value, list):
            value = value[layer] if layer < len(value) else None
        if not isinstance(value, int):
            raise Unlike(f"{self.architecture}.attention.{key} is {value!r:.40}, not a number of heads")
        return value


def _in_layer(name: str) -> str:
    """The name of a layer's tensor without that of the layer."""
    return name.split(".", 2)[-1]
