"""Weights in safetensors files: one, or several with an index that says which tensor is where."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from jaxtyping import Float

from mecefo_jax.errors import DataError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a file, not read yet."""

    name: str
    file: pathlib.Path
    shape: tuple[int, ...]
    dtype: str
    """As safetensors writes it, such as F32."""

    def read(self) -> Float[np.ndarray, "..."]:
        """The tensor, in the file's dtype.

        Raises:
            DataError: the file cannot be read.
        """
        try:
            with safetensors.safe_open(self.file, "np") as file:
                return file.get_tensor(self.name)
        except (OSError, safetensors.SafetensorError) as error:
            raise DataError(f"{self.file}: {self.name} cannot be read ({error})") from error


def write_shards(
    folder: pathlib.Path,
    sizes: Mapping[str, int],
    read: Callable[[str], Float[np.ndarray, "..."]],
    max_shard_bytes: int,
) -> None:
    """Write tensors into one file if they fit into a shard, or else into as many as it takes, one after another.

    Args:
        folder: where; it exists.
        sizes: bytes of each tensor, in the order to be written.
        read: returns a tensor by its name; those of one shard are held at a time.
        max_shard_bytes: most bytes of a shard; a larger tensor has a shard of its own.

    Raises:
        OSError: a file cannot be written.
    """
    shards = _divided(sizes, max_shard_bytes)
    files = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = [_SINGLE]
    for file, names in zip(files, shards, strict=True):
        path = folder / file
        path.touch()
        mode = path.stat().st_mode
        # transformers refuses files that do not say for which library they were written.
        safetensors.numpy.save_file({name: read(name) for name in names}, path, metadata={"format": "pt"})
        path.chmod(mode)  # safetensors lets nobody but the owner read what it writes
    if len(shards) > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def stored_tensors(folder: pathlib.Path) -> dict[str, Stored]:
    """What the safetensors files of a folder hold, by the tensors' names; only their heads are read.

    Raises:
        DataError: there is no such file, one is damaged, or the index does not fit the files.
    """
    if (folder / _SINGLE).exists():
        return _heads(folder / _SINGLE)
    if not (folder / _INDEX).exists():
        others = sorted(path.name for path in folder.glob("pytorch_model*"))
        instead = (
            f" but {others[0]}; load it in transformers and save it with safe_serialization=True" if others else ""
        )
        raise DataError(f"{folder}: holds neither {_SINGLE} nor {_INDEX}{instead}")
    weight_map = _weight_map(folder / _INDEX)
    heads = {file: _heads(folder / file) for file in sorted(set(weight_map.values()))}
    found = {name: stored for held in heads.values() for name, stored in held.items()}
    for name, file in weight_map.items():
        if name not in heads[file]:
            raise DataError(f"{folder / file}: holds no {name}, which {_INDEX} says it does")
    if unlisted := sorted(found.keys() - weight_map.keys()):
        raise DataError(f"{folder / _INDEX}: does not list {unlisted[0]}, which is in {found[unlisted[0]].file.name}")
    return {name: heads[file][name] for name, file in weight_map.items()}


def _divided(sizes: Mapping[str, int], max_shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _heads(path: pathlib.Path) -> dict[str, Stored]:
    try:
        with safetensors.safe_open(path, "np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            return {
                name: Stored(name, path, tuple(head.get_shape()), head.get_dtype()) for name, head in slices.items()
            }
    except (OSError, safetensors.SafetensorError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error


def _weight_map(path: pathlib.Path) -> dict[str, str]:
    try:
        index: Any = json.loads(path.read_text(encoding="utf-8"))
        weight_map = index["weight_map"]
        plain = all(pathlib.PurePath(file).name == file for file in weight_map.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not an index of safetensors files ({error})") from error
    if not plain:
        raise DataError(f"{path}: names files outside its folder")
    return weight_map
