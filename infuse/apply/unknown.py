"""Put a rank's part of a layer into it: linears, tables and counts change, its forward stays. Proven on all ranks in
step.

For a proof the part stands in for a while and the layer is as it was afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from infuse.architectures.split import ROW, SplitShape
from infuse.dtype_cast import in_dtype
from infuse.errors import CheckpointError, RankError
from infuse.layers.combine import Combine, Sum
from infuse.layers.linear import make_linear
from infuse.parallel.group import LOCAL, Group
from infuse.plan.step import Step
from infuse.proof import proof
from infuse.weights.fill import fill_module
from infuse.weights.reader import Reader
from infuse.weights.undo import UndoLog

Put = Callable[[MutableMapping[Any, Any], Any, Any], None]


def build_part(step: Step, combine: Callable[[str], Combine]) -> nn.Module:
    """The linears and tables of a rank's part, empty, on meta, under their paths in the layer; `combine(path)` ends a
    row linear.
    """
    assert isinstance(step.shape, SplitShape)
    root, bodies, formats = nn.Module(), dict(step.bodies), step.formats
    for linear in step.shape.linears:
        combined = combine(f"{step.path}.{linear.path}") if linear.role == ROW else None
        made = make_linear(
            linear.inputs, linear.outputs, linear.bias, formats.get(f"{linear.path}.weight"), bodies, combined
        )
        _place(root, linear.path, made)
    for table in step.shape.tables:
        owner, _, leaf = table.path.rpartition(".")
        empty = torch.empty(table.shape, device="meta")
        if table.buffer:
            _owner(root, owner).register_buffer(leaf, empty)
        else:
            _owner(root, owner).register_parameter(leaf, nn.Parameter(empty, requires_grad=False))
    return root


def over(group: Group) -> Callable[[str], Combine]:
    """The sum over the ranks of `group`, for the linear of each path."""
    return partial(Sum, group)


def _place(root: nn.Module, path: str, module: nn.Module) -> None:
    owner, _, leaf = path.rpartition(".")
    _owner(root, owner).add_module(leaf, module)


def _owner(root: nn.Module, path: str) -> nn.Module:
    """The module at `path`, made with those above it where it is not there."""
    for name in filter(None, path.split(".")):
        if name not in root._modules:
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    return root


def put_part(
    layer: nn.Module, step: Step, part: nn.Module, put: Put, group: Group, adopt: Callable[[nn.Module, nn.Module], None]
) -> None:
    """Give `layer` the linears, tables and counts of `part`; `put(mapping, key, value)` sets each, so that it can be
    taken back.
    """
    shape = step.shape
    assert isinstance(shape, SplitShape)
    for linear in shape.linears:
        old, new = layer.get_submodule(linear.path), part.get_submodule(linear.path)
        adopt(new.train(False), old)
        for module in list(layer.modules()):
            for name, child in module._modules.items():
                if child is old:
                    put(module._modules, name, new)
    for table in shape.tables:
        owner, _, leaf = table.path.rpartition(".")
        module, made = layer.get_submodule(owner), part.get_submodule(owner)
        put(module._buffers if table.buffer else module._parameters, leaf, getattr(made, leaf))
    for count in shape.counts:
        held = vars(layer.get_submodule(count.module))
        section, _, name = count.name.rpartition(".")
        put(held, section or name, _OwnCount(held[section], name, count.value) if section else count.value)
    if shape.all_heads:
        handle = RemovableHandle(layer._forward_pre_hooks, extra_dict=layer._forward_pre_hooks_with_kwargs)
        put(layer._forward_pre_hooks_with_kwargs, handle.id, True)
        put(layer._forward_pre_hooks, handle.id, partial(_give_own_heads, *shape.heads, shape.all_heads))
    for path in shape.attentions if group.size > 1 else ():
        hooks = layer.get_submodule(path)._forward_hooks
        what = f"weights of {step.path}.{path}"
        put(hooks, RemovableHandle(hooks).id, partial(_return_all_heads, group, shape.head_counts, what))


class _OwnCount:
    """A config of which one count is the rank's; all else is the config's own, whatever it is when it is asked."""

    def __init__(self, config: Any, name: str, value: int):
        vars(self).update(_config=config, _name=name, _value=value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_config" not in vars(self):  # while it is copied it has nothing yet
            raise AttributeError(name)
        return self._value if name == self._name else getattr(self._config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._config, name, value)


def _give_own_heads(
    first: int, last: int, heads: int, layer: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict]:
    """Forward pre-hook: of masks and biases of all heads, [B, heads, T, L] or [B heads, T, L], this rank's."""
    hidden = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)

    def own(value: Any) -> Any:
        if not isinstance(value, Tensor) or value is hidden or heads == 1:
            return value
        if value.dim() == 4 and value.shape[1] == heads:
            return value[:, first:last]
        if value.dim() == 3 and hidden is not None and value.shape[0] == hidden.shape[0] * heads:
            return value.unflatten(0, (-1, heads))[:, first:last].flatten(0, 1)
        return value

    return tuple(own(value) for value in args), {name: own(value) for name, value in kwargs.items()}


def _return_all_heads(
    group: Group, counts: tuple[int, ...], what: str, module: nn.Module, args: tuple, output: Any
) -> Any:
    """Forward hook: the attention weights that a module returns last, [B, heads, T, L], of all ranks' heads."""
    last = output[-1] if isinstance(output, tuple) else None
    if not isinstance(last, Tensor) or last.dim() != 4 or last.shape[1] != counts[group.rank]:
        return None
    return (*output[:-1], group.all_gather(last, counts, 1, what))


@contextlib.contextmanager
def standing_in(layer: nn.Module, step: Step, part: nn.Module, group: Group) -> Iterator[None]:
    """`layer` as a rank's part of itself, for as long as the `with` runs."""
    undo = UndoLog()
    try:
        put_part(layer, step, part, undo.put, group, lambda new, old: None)
        yield
    finally:
        undo.take_back()


def filled_part(step: Step, reader: Reader, dtype: torch.dtype, combine: Callable[[str], Combine]) -> nn.Module:
    part = build_part(step, combine)
    fill_module(part, step.fills, reader, dtype, dict(step.bodies))
    return part


def proven(
    layer: nn.Module, step: Step, cases: Sequence[proof.Case], reader: Reader, dtype: torch.dtype, group: Group
) -> tuple[int, str | None]:
    """Which reading of a layer is the layer, 0 being the step itself, else why none is; the same answer on every rank.

    Before ranks run together, each runs alone without sums: what raises does so there, and no rank waits for another in
    vain.
    """
    wanted: list[proof.Expected] = []

    def expect() -> None:
        with _held_in_float32(layer):
            wanted.append(proof.expected(layer, list(cases), dtype))

    fault = _agreed(group, step, expect)
    if fault is not None:
        return 0, fault
    first = None
    for number, reading in enumerate((step, *step.others)):
        plain = replace(reading, bodies=(), fills=tuple(replace(fill, format=None) for fill in reading.fills))
        fault = (
            _agreed(group, step, partial(_run_alone, layer, plain, cases, reader))
            or _agreed(group, step, partial(_structure, layer, plain, cases, reader, group, wanted[0]))
            or _agreed(group, step, partial(_result, layer, reading, cases, reader, dtype, group, wanted[0]))
        )
        if fault is None:
            return number, None
        first = first or fault
    more = f" (and so do {len(step.others)} other readings of it)" if step.others else ""
    return 0, f"{first}{more}"


@contextlib.contextmanager
def _held_in_float32(layer: nn.Module) -> Iterator[None]:
    """The layer with all of its weights in float32, not in parts as they run: T5 rounds to the dtype that it sees a
    weight in.
    """
    kept = {parameter: parameter.data for parameter in layer.parameters() if parameter.is_floating_point()}
    try:
        for parameter, data in kept.items():
            parameter.data = data.float()
        yield
    finally:
        for parameter, data in kept.items():
            parameter.data = data


def _agreed(group: Group, step: Step, look: Callable[[], str | None]) -> str | None:
    """The faults that `look` returns or raises, of all ranks."""
    try:
        fault = look()
    except (CheckpointError, RankError):
        raise
    except Exception as error:  # whatever the layer's own forward does with a part of itself
        fault = f"not proven: {type(error).__name__}: {error}".partition("\n")[0]
    return group.any_fault(fault, f"the proof of {step.path}")


def _run_alone(layer: nn.Module, step: Step, cases: Sequence[proof.Case], reader: Reader) -> None:
    part = filled_part(step, reader, torch.float32, lambda path: _alone)
    with standing_in(layer, step, part, LOCAL), in_dtype(layer, torch.float32):
        for case in cases:
            proof.outputs(layer, case, torch.float32, case.caches[0])


def _alone(part: Tensor) -> Tensor:
    return part


def _structure(
    layer: nn.Module, step: Step, cases: Sequence[proof.Case], reader: Reader, group: Group, wanted: proof.Expected
) -> str | None:
    with standing_in(layer, step, filled_part(step, reader, torch.float32, over(group)), group):
        return proof.structure_fault(layer, layer, list(cases), wanted)


def _result(
    layer: nn.Module,
    step: Step,
    cases: Sequence[proof.Case],
    reader: Reader,
    dtype: torch.dtype,
    group: Group,
    wanted: proof.Expected,
) -> str | None:
    with standing_in(layer, step, filled_part(step, reader, dtype, over(group)), group), in_dtype(layer, dtype):
        return proof.result_fault(layer, step, list(cases), wanted, dtype)


def together(steps: Sequence[tuple[Step, tuple]], refused: Mapping[tuple, str]) -> dict[tuple, str]:
    """Key → reason of layers that fall with others: the first of a class makes the biases of all heads for those that
    follow.
    """
    classes = {step.layer for step, _ in steps if isinstance(step.shape, SplitShape) and step.shape.tables}
    fallen = {step.layer: step.path for step, key in steps if key in refused and step.layer in classes}
    return {
        key: f"{fallen[step.layer]}, with which it shares the biases of its heads, was refused"
        for step, key in steps
        if step.layer in fallen and key not in refused
    }
