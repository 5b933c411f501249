"""ModelTensors: a checkpoint's tensors by model name. All mismatches are reported in one error."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from infuse.architectures.foreign.plain import linear_shape
from infuse.ground.errors import CheckpointError
from infuse.weights.checkpoint import Checkpoint, in_words, same_values
from infuse.weights.foreign import Recognised, Unread, recognised
from infuse.weights.lazy import LazyTensor, Transposed
from infuse.weights.names import Naming, held
from infuse.weights.pieces import Packed
from infuse.weights.plain_values import without_codes
from infuse.weights.saved_shards import SavedShards

_FORMER_BUFFERS = ("rotary_emb.inv_freq", ".position_ids", ".masked_bias")  # older models saved them in each layer


@dataclass(frozen=True)
class ModelTensors:
    """The `tensors` of a checkpoint by model name; tied tensors appear under each of their names.

    `checkpoint`: None if a live model holds the tensors. `notes` reports tensors unknown to the model and copies that
    differ.
    """

    checkpoint: Checkpoint | SavedShards | None
    tensors: Mapping[str, LazyTensor]
    notes: tuple[str, ...] = ()


@dataclass
class _Faults:
    """Mismatches: tensors missing from the checkpoint, tensors of another model, and wrong shapes or dtypes."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshaped: list[str] = field(default_factory=list)

    def raise_any(self, form: str, hint: str | None = None) -> None:
        kinds = {"missing": self.missing, "unexpected": self.unexpected, "misshaped": self.misshaped}
        lines = [f"  {kind}  {line}" for kind, faults in kinds.items() for line in faults]
        if lines:
            counts = ", ".join(f"{len(faults)} {kind}" for kind, faults in kinds.items() if faults)
            if any(name.endswith((".attn_qkvw", ".inter_w")) for name in self.unexpected):
                what = "these are layers as DeepSpeed replaces them"
                lines.append(f"{what}; give the checkpoint that they were made from")
            if hint is not None:
                lines.append(hint)
            raise CheckpointError(f"the checkpoint ({form}) is not this model's: {counts}\n" + "\n".join(lines))


def model_tensors(
    model: nn.Module,
    checkpoint: Checkpoint | SavedShards,
    without: Callable[[str], bool] = lambda name: False,
    packings: Callable[[], Mapping[str, Packed]] = dict,
) -> ModelTensors:
    """Find the tensors of `model` in a checkpoint; CheckpointError lists all missing, unexpected and misshaped ones.

    Names for which `without` returns True are ignored on both sides. `packings` tells the packed matrices of the model,
    of which a checkpoint in pieces has parts. Buffers may be missing if transformers allows it.
    """
    expected = {name: tensor for name, tensor in held(model).items() if not without(name)}
    naming = Naming(model)
    by_name, names = _by_name(naming, [name for name in checkpoint.pieces if not without(name)], expected)
    foreign = Recognised()
    if isinstance(checkpoint, Checkpoint):
        shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
        foreign = recognised(Unread(checkpoint, model, naming, tuple(names), by_name, shapes))
    faults = _Faults(misshaped=[f"{name}: {fault}" for name, fault in foreign.faults.items()])
    matching = _Matching(
        checkpoint,
        expected,
        {name: stored for name, stored in by_name.items() if stored not in foreign.used},
        dict(foreign.tensors),
        packings() if checkpoint.in_pieces else {},
        faults,
        _inputs_first(model) if isinstance(checkpoint, Checkpoint) and checkpoint.titles else frozenset(),
    )
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in expected.items():
        if name not in foreign.faults:
            by_tensor.setdefault(id(tensor), []).append(name)
    optional = _patterns(model, "_keys_to_ignore_on_load_missing")
    for tied in by_tensor.values():
        matching.match(tied, may_be_missing=not isinstance(expected[tied[0]], nn.Parameter) and optional(tied[0]))
    left = [name for name in names if name not in foreign.used and not _is_empty_bias(checkpoint, name)]
    faults.unexpected, harmless = _judged(model, naming, left)
    if not checkpoint.told:
        faults.misshaped += [f"{name}: several files have it, with other values" for name in matching.drifted]
    faults.raise_any(checkpoint.form, checkpoint.hint if isinstance(checkpoint, Checkpoint) else None)
    notes: list[str] = []
    if isinstance(checkpoint, Checkpoint):
        notes = [*_forms(checkpoint), *checkpoint.notes, *without_codes(matching.tensors)]
    if harmless:
        what = f"the checkpoint has {len(harmless)} tensors that the model has no place for"
        notes.append(f"{what}: {', '.join(harmless)}")
    if matching.drifted:
        what = f"{len(matching.drifted)} tensors that ranks saved whole differ between them"
        notes.append(f"{what}; the first rank's are taken: {', '.join(matching.drifted)}")
    return ModelTensors(checkpoint, matching.tensors, tuple(notes))


def _forms(checkpoint: Checkpoint) -> Iterator[str]:
    """Name the quantized forms of a checkpoint."""
    for title, count in Counter(checkpoint.titles.values()).items():
        what = "matrix of the checkpoint is" if count == 1 else "matrices of the checkpoint are"
        yield f"{count} {what} quantized: {title}"


@dataclass
class _Matching:
    """Adds the matching tensors of a model to `tensors`, and mismatches to `faults`.

    `inputs_first`: weights [in, out], which quantized forms store as [out, in]. `drifted`: checkpoint names of tensors
    whose values differ between files.
    """

    checkpoint: Checkpoint | SavedShards
    expected: Mapping[str, Tensor]
    by_name: dict[str, str]
    tensors: dict[str, LazyTensor]
    packed: Mapping[str, Packed]
    faults: _Faults
    inputs_first: Set[str] = frozenset()
    drifted: list[str] = field(default_factory=list)

    def match(self, tied: list[str], *, may_be_missing: bool) -> None:
        """Find the checkpoint tensor for one tensor of the model; `tied` lists all its names."""
        named = [name for name in tied if name in self.by_name]
        for name in named:
            self._take(name)
        there = [name for name in tied if name in self.tensors]
        if not there:
            if not named and not may_be_missing:
                self.faults.missing.append(" = ".join(tied))
            return
        first = self.tensors[there[0]]
        for name in there[1:]:
            if not (self.checkpoint.holds_replaced or same_values(first, self.tensors[name])):
                what = f"the model ties it to {there[0]}, the checkpoint has other values for it"
                self.faults.misshaped.append(f"{name}: {what}; untie it in the model's config")
        for name in tied:
            self.tensors.setdefault(name, first)

    def _take(self, name: str) -> None:
        """Take the checkpoint tensor that matches `name`, if its shape and dtype fit."""
        stored, needed = self.by_name[name], self.expected[name]
        wanted, pieces = tuple(needed.shape), self.checkpoint.pieces[stored]
        if name in self.inputs_first and isinstance(self.checkpoint, Checkpoint) and stored in self.checkpoint.titles:
            joined = self.checkpoint.joined(stored, wanted[::-1])
            joined = None if joined is None else Transposed(joined)
        else:
            joined = self.checkpoint.joined(stored, wanted, self.packed.get(name))
        if joined is None:
            self.faults.misshaped.append(f"{name}: {in_words(pieces.shapes)}, the model has {wanted}")
            return
        self.tensors[name] = joined
        if _kind(pieces.dtype) != _kind(needed.dtype):
            self.faults.misshaped.append(f"{name}: {pieces.dtype}, the model has {needed.dtype}")
        elif not pieces.are_copies(wanted):
            self.drifted.append(stored)


def _kind(dtype: torch.dtype) -> str:
    return "floating" if dtype.is_floating_point else "complex" if dtype.is_complex else "integer"


def _by_name(naming: Naming, stored: list[str], expected: Mapping[str, Tensor]) -> tuple[dict[str, str], list[str]]:
    """Map names in the model to names in the checkpoint, and list the checkpoint names that match nothing."""
    by_name = {name: name for name in stored if name in expected}
    left = []
    for name in stored:
        if name in by_name:
            continue
        places = [place for place in naming.variants(name) if place in expected and place not in by_name]
        if places:
            by_name[places[0]] = name
        else:
            left.append(name)
    return by_name, left


def _patterns(model: nn.Module, attribute: str) -> Callable[[str], bool]:
    patterns = [re.compile(text) for text in getattr(model, attribute, None) or ()]
    return lambda name: any(pattern.search(name) for pattern in patterns)


def _inputs_first(model: nn.Module) -> frozenset[str]:
    """Weights of linears that are [in, out]: those of transformers' Conv1D."""
    shapes = ((path, linear_shape(module)) for path, module in model.named_modules())
    return frozenset(f"{path}.weight" for path, shape in shapes if shape is not None and shape.transposed)


def _is_empty_bias(checkpoint: Checkpoint | SavedShards, name: str) -> bool:
    """True for a bias of zeros beside codes: older files of GPTQ have one for each matrix."""
    path, _, leaf = name.rpartition(".")
    if leaf != "bias" or not isinstance(checkpoint, Checkpoint) or f"{path}.weight" not in checkpoint.titles:
        return False
    return not bool(checkpoint.pieces[name].first.read().any())


def _judged(model: nn.Module, naming: Naming, left: list[str]) -> tuple[list[str], list[str]]:
    """Split the unmatched names into those of another model and those of heads that this class lacks.

    A name inside a list of layers implies another model: more layers, or layers with other parts. Buffers that are
    recomputed belong to neither group.
    """
    lists = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, nn.ModuleList) and path)
    computed = {name for name, _ in model.named_buffers()}
    ignored = _patterns(model, "_keys_to_ignore_on_load_unexpected")
    foreign: list[str] = []
    harmless: list[str] = []
    for name in left:
        variants = set(naming.variants(name))
        if ignored(name) or variants & computed or name.endswith(_FORMER_BUFFERS):
            continue
        (foreign if any(variant.startswith(lists) for variant in variants) else harmless).append(name)
    return foreign, harmless
