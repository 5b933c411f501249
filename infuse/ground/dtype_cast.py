"""Run a module temporarily in another dtype, casting weights only while they are used; or cast it permanently."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from infuse.ground.temporary_hooks import TemporaryHooks

_STRICT = "_keep_in_fp32_modules_strict"
_WIDE = "_keep_in_fp32_modules"
# Parameters that these modules make in float32, whatever the dtype, beside transformers' own lists: from_pretrained
# leaves them so.
_MADE_WIDE = {"OlmoHybridGatedDeltaNet": "A_log", "HunYuanMoEV1Gate": "wg.weight"}
_STATISTICS = ("running_mean", "running_var")  # of a batch norm
_PARTS = 16  # a merged 16-bit matrix plus one such part in float32 needs less memory than its whole layer
# 4 MiB in float32: allocators keep blocks of this size, while larger ones cost page faults every time.
_PART_VALUES = 1 << 20
_ONEDNN_VALUES = 1 << 22  # of a weight; oneDNN keeps 12 MB for its own code, which smaller models notice


class CastsOnUse(nn.Module):
    """A module that casts its parameters to `running_dtype` as it uses them; None: it runs in their own dtype."""

    running_dtype: torch.dtype | None = None


@contextmanager
def in_dtype(module: nn.Module, dtype: torch.dtype, exact: Collection[str] = ()) -> Iterator[None]:
    """Run `module` in `dtype` inside the `with`, except the parameters that are named in `exact`.

    Linears cast their weight part by part as they run, and experts are cast a few at a time and only if a token uses
    them, so memory hardly grows. Statistics of batch norms are cast with their weights, as `module.to` does.
    """
    if type(module) is nn.Embedding:  # a lookup is exact in any dtype that is wide enough
        yield
        return
    cast_too = {p for name, p in module.named_parameters() if name not in exact}
    on_use = [
        child for child in module.modules() if isinstance(child, CastsOnUse) and cast_too.issuperset(child.parameters())
    ]
    cast_too -= {p for child in on_use for p in child.parameters()}
    kept = {p: p.data for p in cast_too if p.is_floating_point() and p.dtype != dtype}
    hooks, patched = TemporaryHooks(), []

    def cast(owner: nn.Module) -> None:
        for p in owner.parameters(recurse=False):
            if p in kept:
                p.data = kept[p].to(dtype)

    def restore(owner: nn.Module) -> None:
        for p in owner.parameters(recurse=False):
            if p in kept:
                p.data = kept[p]

    try:
        parents = {child: parent for parent in module.modules() for child in parent.children()}
        for child in module.modules():
            if not any(p in kept and p.dim() > 1 for p in child.parameters(recurse=False)):
                continue
            rounds = child in parents and (_reads_dtype(parents[child]) or _takes_weight(parents[child], child))
            if (_multiplies(child) and not rounds) or _are_experts(child, dtype):
                patched.append((child, vars(child).get("forward")))
                run: Any = _in_parts if _multiplies(child) else _by_expert
                child.forward = partial(run, child, dtype)
            else:
                parent = parents.get(child, child)
                runs = parent if rounds or _only_holds(child, parent) else child
                hooks.before(runs, partial(_of, cast, child))
                hooks.after(runs, partial(_of, restore, child))
        for child in on_use:
            child.running_dtype = dtype
        for p, data in kept.items():
            if p.dim() < 2:
                p.data = data.to(dtype)
        with _cast_statistics(module, cast_too, dtype):
            yield
    finally:
        for child in on_use:
            child.running_dtype = None
        hooks.close()
        for child, forward in patched:
            vars(child).pop("forward", None)
            if forward is not None:
                child.forward = forward  # type: ignore[method-assign]
        for p, data in kept.items():
            p.data = data


@contextmanager
def _cast_statistics(module: nn.Module, cast_too: Collection[Tensor], dtype: torch.dtype) -> Iterator[None]:
    """Cast running statistics inside the `with`, of the batch norms whose parameters are all in `cast_too`."""
    norms = [each for each in module.modules() if isinstance(each, _BatchNorm)]
    norms = [norm for norm in norms if all(parameter in cast_too for parameter in norm.parameters())]
    kept = [(norm._buffers, leaf, norm._buffers[leaf]) for norm in norms for leaf in _STATISTICS]
    try:
        for buffers, leaf, buffer in kept:
            buffers[leaf] = None if buffer is None else buffer.to(dtype)
        yield
    finally:
        for buffers, leaf, buffer in kept:
            buffers[leaf] = buffer


def _casts(module: nn.Module) -> bool:
    """Whether forward casts its result. CLVP's does not: it passes rotary angles to 16-bit linears as they are."""
    if not _read_names(module).isdisjoint({"float", "to"}):
        return True
    try:
        source = inspect.getsource(inspect.unwrap(type(module).forward))
    except (OSError, TypeError):
        return False
    return re.search(r"type_as\((?!self\.inv_freq)", source) is not None


def _reads_dtype(module: nn.Module) -> bool:
    """Whether forward may cast to the dtype in which a weight is stored, as T5 does before `wo`."""
    return {"weight", "dtype"} <= _read_names(module)


def _takes_weight(parent: nn.Module, module: nn.Module) -> bool:
    """Whether the parent's forward reads the module's weight itself, as Mamba's does, instead of calling the module."""
    name = next(name for name, child in parent._modules.items() if child is module)
    try:
        source = inspect.getsource(inspect.unwrap(type(parent).forward))
    except (OSError, TypeError):
        return False
    return f"self.{name}.weight" in source


def _only_holds(module: nn.Module, parent: nn.Module) -> bool:
    """Whether the parent computes with the module's parameters: the module has no forward, or gets them as arguments
    (DBRX).
    """
    if type(module).forward is nn.Module.forward:
        return True
    names = module._parameters.keys()
    return names <= _read_names(parent) and names.isdisjoint(_read_names(module))


def _read_names(module: nn.Module) -> set[str]:
    """Names of the attributes and functions that the module's forward reads."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return set() if code is None else set(code.co_names)


def _are_experts(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether the module adds up experts, forward(hidden, index, weights), with parameters narrower than `dtype`."""
    count, down = getattr(module, "num_experts", None), module._parameters.get("down_proj")
    if down is None or down.dtype.itemsize >= dtype.itemsize or "forward" in vars(module):
        return False
    alike = all(p is not None and p.dim() > 1 and len(p) == count for p in module._parameters.values())
    return alike and len(inspect.signature(type(module).forward).parameters) == 4


def _by_expert(module: Any, dtype: torch.dtype, *args: Tensor, **kwargs: Tensor) -> Tensor:
    """Sum the experts that are used, casting only a few to `dtype` at a time.

    Routes to others get the weight 0.
    """
    hidden, index, weights = (*args, *kwargs.values())
    count, originals = module.num_experts, {p: p.data for p in module.parameters(recurse=False)}
    total, step = torch.zeros_like(hidden), -(-count // _PARTS)
    # Each page that is new to the process costs a fault, so the same memory serves all experts.
    wide = {p: torch.empty_like(data[:step], dtype=dtype) for p, data in originals.items()}
    used = index.unique()
    used = used[(used >= 0) & (used < count)]  # some routers route dropped tokens to an expert index out of range
    try:
        for chosen in used.split(step):
            at = torch.full_like(index, -1)
            for place, expert in enumerate(chosen.tolist()):
                at[index == expert] = place
                for p, data in originals.items():
                    wide[p][place].copy_(data[expert])
            module.num_experts = len(chosen)
            for p in originals:
                p.data = wide[p][: len(chosen)]
            total += type(module).forward(module, hidden, at.clamp(min=0), weights.where(at >= 0, 0))
    finally:
        module.num_experts = count
        for p, data in originals.items():
            p.data = data
    return total


def kept_in_float32(model: nn.Module, dtype: torch.dtype) -> frozenset[str]:
    """Names of the parameters that stay in float32 in `dtype`, as when transformers or diffusers loads the model.

    Their names match `_keep_in_fp32_modules_strict`, or their modules make them in float32 whatever the dtype; and they
    are in float32 or on meta. A model that was cast as a whole has them in 16 bits, and keeps them so. In float16,
    linears in `_keep_in_fp32_modules` count, too, if their caller casts to their dtype: T5's sums exceed float16.
    Models of diffusers have one list for both dtypes.
    """
    if dtype.itemsize > 2:
        return frozenset()
    patterns = {name.replace("*", ".*") for module in model.modules() for name in _names(module, _STRICT)}
    of_diffusers = {name for module in model.modules() if _of_diffusers(module) for name in _names(module, _WIDE)}
    patterns |= {rf"(^|\.){re.escape(name)}(\.|$)" for name in of_diffusers}
    modules = ((path, _MADE_WIDE.get(type(module).__name__)) for path, module in model.named_modules())
    names = [f"{path}.{leaf}".lstrip(".") for path, leaf in modules if leaf]
    names += _cast_to(model) if dtype == torch.float16 else []
    patterns |= {f"^{re.escape(name)}$" for name in names}
    if not patterns:
        return frozenset()
    pattern, named = re.compile("|".join(sorted(patterns))), model.named_parameters(remove_duplicate=False)
    return frozenset(name for name, p in named if pattern.search(name) and (p.is_meta or p.dtype == torch.float32))


def _cast_to(model: nn.Module) -> list[str]:
    """Weights of the linears in `_keep_in_fp32_modules` whose caller casts its activations to their dtype."""
    wide = {name for module in model.modules() for name in _names(module, _WIDE)}
    callers = [(path, module) for path, module in model.named_modules() if wide and _reads_dtype(module)]
    return [
        f"{path}.{name}.weight"
        for path, module in callers
        for name, child in module.named_children()
        if name in wide and isinstance(child, nn.Linear)
    ]


def parameters_to_cast(model: nn.Module, dtype: torch.dtype) -> list[nn.Parameter]:
    """The parameters of another dtype, except those of our own modules and those that stay in float32."""
    ours = {id(p) for module in model.modules() if _is_ours(module) for p in module._parameters.values()}
    exact = kept_in_float32(model, dtype)
    floating = ((name, p) for name, p in model.named_parameters() if p.is_floating_point() and p.dtype != dtype)
    return [parameter for name, parameter in floating if name not in exact and id(parameter) not in ours]


def cast_buffers(
    model: nn.Module, dtype: torch.dtype, put: Callable[[MutableMapping[str, Any], str, Tensor], None]
) -> None:
    """Cast buffers as `model.to(dtype)` does, by `put(buffers, name, tensor)`, except those that must stay exact."""
    cast: dict[int, Tensor] = {}  # keeps shared buffers shared
    for module, leaf, buffer in buffers_to_cast(model, dtype):
        put(module._buffers, leaf, cast.setdefault(id(buffer), buffer.to(dtype)))


def buffers_to_cast(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield each buffer that does not stay exact in a model of this dtype, with its module and its name there.

    Exact are rotary frequencies that their module casts where it uses them, the modules that transformers or diffusers
    keeps in float32 for this dtype (`_keep_in_fp32_modules`), and buffers of our own modules.
    """
    wide = [module for module in model.modules() if dtype == torch.float16 or _of_diffusers(module)]
    named = [name for module in wide for name in _names(module, _WIDE)]
    named += [name for module in model.modules() for name in _names(module, _STRICT)]
    kept = re.compile("|".join(rf"(^|\.){name}(\.|$)" for name in dict.fromkeys(named)) or r"(?!)")
    for path, module in model.named_modules():
        if _is_ours(module):  # scales have their own dtype
            continue
        for leaf, buffer in list(module._buffers.items()):
            other = buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype
            exact = kept.search(f"{path}.{leaf}") or (leaf.endswith("inv_freq") and _casts(module))
            if buffer is not None and other and not exact:
                yield module, leaf, buffer


def _is_ours(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "infuse"


def _of_diffusers(module: nn.Module) -> bool:
    return any(cls.__module__.partition(".")[0] == "diffusers" for cls in type(module).__mro__)


def _names(module: nn.Module, attribute: str) -> Iterable[str]:
    names = getattr(module, attribute, None)
    return names if isinstance(names, (list, tuple, set)) else ()


def _of(change: Callable[[nn.Module], None], owner: nn.Module, *_: Any) -> None:
    """A hook that applies `change` to `owner`, whichever module it is on."""
    change(owner)


def _multiplies(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether the module is a linear, and no subclass that computes something else (a router)."""
    is_plain = type(module).forward is nn.Linear.forward or "_combine" in vars(module)
    return isinstance(module, nn.Linear) and is_plain


def _in_parts(linear: nn.Linear, dtype: torch.dtype, x: Tensor) -> Tensor:
    """linear(x) with its weight cast to `dtype` part by part."""
    rows = max(1, min(-(-linear.out_features // _PARTS), _PART_VALUES // max(linear.in_features, 1)))
    x = x.to(dtype)  # T5 casts x to the dtype of the stored weight
    # One buffer for all parts: memory that is given back and taken again costs a page fault for every 4 KiB.
    wide = torch.empty(rows, linear.in_features, dtype=dtype, device=x.device)
    parts = linear.weight.detach().split(rows)
    multiply = _by_onednn if _favours_onednn(linear, x) else F.linear
    outs = [multiply(x, wide[: len(part)].copy_(part)) for part in parts]
    del wide
    out = torch.cat(outs, dim=-1)
    out = out if linear.bias is None else out + linear.bias
    combine = vars(linear).get("_combine")  # combines this rank's part with those of the other ranks
    return out if combine is None else combine(out)


def _favours_onednn(linear: nn.Linear, x: Tensor) -> bool:
    """Whether to use oneDNN in float32: on AMD, MKL, which F.linear calls, takes three times as long."""
    large = linear.weight.numel() >= _ONEDNN_VALUES
    return large and x.dtype == torch.float32 and x.device.type == "cpu" and torch.backends.mkldnn.is_available()


def _by_onednn(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
