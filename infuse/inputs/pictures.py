"""Pictures and videos that a model takes: whole, as patches in a grid, or as frames, by its arguments and its config.

Numbers that configs leave out have the usual values. The pictures of a batch are of one size; grids are not square.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from infuse.inputs.component import MakeTensor
from infuse.inputs.known import known

_FRAMES = 4  # of videos whose number of frames the config leaves open
_ROWS, _COLUMNS = 2, 3  # of the grid, in units of patches that the model merges
_PATCH, _SIDE = 16, 4  # patch size where the config has none; patches in a row of a picture whose size it leaves out
_INSIDE = ("vision_config", "image_config", "backbone_config", "video_config", "encoder_config", "sam_config")
# Towers that take patches as small pictures, by the dimensions of all patches. The others take a row for each.
_DIMS = {"Kimi_K25VisionModel": 4, "PaddleOCRVisionModel": 5, "PaddleOCRVisionTransformer": 5}
_GRIDS = ("grid_thw", "image_grid_thw", "grid_hw")


def pictures(model: nn.Module, names: Collection[str], make: MakeTensor, batch: int) -> dict[str, Tensor]:
    """Arguments of a forward that takes only pictures, one for each row of the batch."""
    config: Any = getattr(model, "config", None)
    if grid := next((name for name in _GRIDS if name in names), None):
        return _in_grids(model, config, names, grid, make, batch)
    if "spatial_shapes" in names and "pixel_values" in names:
        return _padded_patches(config, make, batch)
    if "pixel_position_ids" in names:
        return _placed_patches(config, make, batch)
    if "target_sizes" in names:
        return _row_of_patches(config, make, batch)
    if "flattened_patches" in names:
        return {"flattened_patches": _numbered_patches(config, make, batch)}
    frames = _number(config, "num_frames")
    main = "pixel_values_videos" if "pixel_values_videos" in names else "pixel_values"
    if "pixel_values" not in names and main not in names:
        main = next(iter(names))
    if main == "pixel_values_videos" or (frames and _number(config, "mit_hidden_size") is None):
        channels, *size = _picture(config)
        made = {main: make("values", (batch, frames or _FRAMES, channels, *size))}
    else:
        made = {main: make("values", (batch, *_picture(config)))}
    if "bool_masked_pos" in names and frames:
        made["bool_masked_pos"] = _half_masked(config, frames, make, batch)
    return made


def takes_pictures(model: nn.Module, names: Collection[str]) -> bool:
    """Whether a forward takes pictures or videos, and no text."""
    if "input_ids" in names:
        return False
    main = getattr(model, "main_input_name", "") in ("pixel_values", "pixel_values_videos", "image")
    own = next(iter(names), "") not in ("hidden_states", "inputs_embeds", "hidden_state", "input_ids")
    given = not {"pixel_values", "pixel_values_videos", "grid_thw", "flattened_patches"}.isdisjoint(names)
    return given or (main and own)


def _in_grids(
    model: nn.Module, config: Any, names: Collection[str], grid: str, make: MakeTensor, batch: int
) -> dict[str, Tensor]:
    """Patches of all pictures in one list [N, C * T * P * P], with each picture's frames, rows and columns."""
    merge = _number(config, "spatial_merge_size", "merge_size", "merge_kernel_size", "downsample_factor") or 2
    merge = merge if isinstance(merge, int) else math.prod(merge[:1])
    rows, columns = _ROWS * merge, _COLUMNS * merge
    count = batch * rows * columns
    main = next(name for name in names if name in ("pixel_values", "hidden_states"))
    width = _patch_width(model, config)
    dims = _DIMS.get(type(model).__name__, 2)
    square = (_channels(config), _patch(config), _patch(config))
    shape = (count, width) if dims == 2 else (count, *square) if dims == 4 else (1, count, *square)
    made = {main: make("values", shape), grid: known(make, [[1, rows, columns]] * batch)}
    if "merge_sizes" in names:
        made["merge_sizes"] = known(make, [merge] * batch)
    return made


def _patch_width(model: nn.Module, config: Any) -> int:
    """Numbers in a patch: what the embedding of patches takes, or else the first convolution or linear."""
    named = dict(model.named_modules())
    of_patches = [module for path, module in named.items() if "patch_embed" in path]
    for module in (*of_patches, *named.values()):
        if isinstance(module, (nn.Conv2d, nn.Conv3d)):
            return module.in_channels * math.prod(module.kernel_size)
        if isinstance(module, nn.Linear):
            return module.in_features
    return _channels(config) * _patch(config) ** 2


def _padded_patches(config: Any, make: MakeTensor, batch: int) -> dict[str, Tensor]:
    """As many patches for each picture as the config says, of which the picture fills some."""
    most = _number(config, "num_patches", "max_num_patches") or _ROWS * _COLUMNS
    rows = max(1, math.isqrt(most) - 1)
    filled = rows * (rows + 1)
    return {
        "pixel_values": make("values", (batch, most, _channels(config) * _patch(config) ** 2)),
        "pixel_attention_mask": known(make, [[1] * filled + [0] * (most - filled)] * batch),
        "spatial_shapes": known(make, [[rows, rows + 1]] * batch),
    }


def _placed_patches(config: Any, make: MakeTensor, batch: int) -> dict[str, Tensor]:
    """Patches for each picture [B, N, P * P * C], and the column and row of each."""
    merge = _number(config, "pooling_kernel_size") or 1
    rows, columns = _ROWS * merge, _COLUMNS * merge
    places = [[column, row] for row in range(rows) for column in range(columns)]
    return {
        "pixel_values": make("values", (batch, rows * columns, _channels(config) * _patch(config) ** 2)),
        "pixel_position_ids": known(make, [places] * batch),
    }


def _row_of_patches(config: Any, make: MakeTensor, batch: int) -> dict[str, Tensor]:
    """The patches of all pictures beside each other in one [1, C, P, N * P], with each picture's rows and columns."""
    rows, columns = 2 * _ROWS, 4 * _ROWS  # merged in twos, twice
    patch = _patch(config)
    return {
        "pixel_values": make("values", (1, _channels(config), patch, batch * rows * columns * patch)),
        "target_sizes": known(make, [[rows, columns]] * batch),
    }


def _numbered_patches(config: Any, make: MakeTensor, batch: int) -> Tensor:
    """Patches [B, N, 2 + C * P * P] that begin with the number of their row and column."""
    patches = make("values", (batch, _ROWS * _COLUMNS, _channels(config) * _patch(config) ** 2))
    numbers = make("mask", (batch, _ROWS * _COLUMNS, 2))
    return torch.cat((numbers.to(patches), patches), dim=-1)


def _half_masked(config: Any, frames: int, make: MakeTensor, batch: int) -> Tensor:
    """Which patches of a video are hidden: the first half."""
    _, height, width = _picture(config)
    tubelet = _number(config, "tubelet_size") or 1
    tubelet = tubelet if isinstance(tubelet, int) else tubelet[0]
    count = frames // tubelet * (height // _patch(config)) * (width // _patch(config))
    return known(make, [[place < count // 2 for place in range(count)]] * batch)


def _picture(config: Any) -> tuple[int, int, int]:
    """Channels, height and width."""
    size = _number(config, "image_size", "img_size", "crop_size", "input_size")
    if isinstance(size, dict):
        size = (size["height"], size["width"])
    if size is None:
        size = max(_SIDE * _patch(config), 64)
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    return _channels(config), height, width


def _channels(config: Any) -> int:
    return _number(config, "num_channels", "in_channels", "in_chans", "image_channels", "num_image_channels") or 3


def _patch(config: Any) -> int:
    patch = _number(config, "patch_size") or _PATCH
    return patch if isinstance(patch, int) else tuple(patch)[-1]


def _number(config: Any, *names: str) -> Any:
    """The first of these that a config has, or else a config in it for pictures."""
    inner = [getattr(config, name, None) for name in _INSIDE]
    for one in (config, *inner):
        value = next((value for name in names if (value := getattr(one, name, None)) is not None), None)
        if value is not None:
            return value
    return next((value for one in inner if one is not None and (value := _number(one, *names)) is not None), None)
