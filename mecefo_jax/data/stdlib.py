"""The text that every machine with Python has: the source code of its standard library, as a tfds dataset.

About 12 MB of English-like text and code in some 700 files. Tests, installed packages and files generated for one
machine are left out. Files, not parts of files, are held out for evaluation, by a hash of their relative path. The
text differs from one Python version to another, and so does its fingerprint.
"""

import contextlib
import functools
import hashlib
import io
import pathlib
import platform
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow_datasets as tfds

from mecefo_jax.data.documents import Source, is_held_out
from mecefo_jax.data.records import SET_CACHE_DIR
from mecefo_jax.data.tfds_text import documents_of
from mecefo_jax.errors import DataError
from mecefo_jax.locking import locked

_EXCLUDED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


class StdlibText(tfds.core.GeneratorBasedBuilder):
    """A document for each Python source file below a folder, in the order of relative paths."""

    VERSION = tfds.core.Version("1.0.0")
    # Without this tfds takes the folder of the module for a dataset package and looks for its files there.
    pkg_dir_path = pathlib.Path(__file__).parent / "stdlib"

    def __init__(self, *, root: pathlib.Path, validation_fraction: float, **kwargs: Any) -> None:
        self._root = root
        self._validation_fraction = validation_fraction
        super().__init__(**kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict({"path": tfds.features.Text(), "text": tfds.features.Text()})
        return tfds.core.DatasetInfo(
            builder=self,
            description="Source code of the Python standard library, without its tests.",
            features=features,
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        del dl_manager
        splits: dict[str, list[pathlib.Path]] = {"train": [], "validation": []}
        for path in source_files(self._root):
            held_out = is_held_out(_key(self._root, path), self._validation_fraction)
            splits["validation" if held_out else "train"].append(path)
        return {name: self._generate_examples(paths) for name, paths in splits.items() if paths}

    def _generate_examples(self, paths: Sequence[pathlib.Path]) -> Iterator[tuple[int, dict[str, str]]]:
        for index, path in enumerate(paths):
            # tokenize heeds the encoding that a source file declares.
            with tokenize.open(path) as stream:
                yield index, {"path": path.relative_to(self._root).as_posix(), "text": stream.read()}


def stdlib_source(cache_dir: pathlib.Path, validation_fraction: float, root: pathlib.Path | None = None) -> Source:
    """Return the source of the running Python's standard library.

    Args:
      cache_dir: folder in which the tfds dataset is built when first needed.
      validation_fraction: share of the files to hold out.
      root: folder to read instead of the standard library.

    Raises:
      DataError: the folder holds no Python source, or a file of it cannot be read.
    """
    root = pathlib.Path(sysconfig.get_path("stdlib")) if root is None else root
    paths = source_files(root)
    if not paths:
        raise DataError(f"{root}: no Python source files, which data.source builtin needs; set --data.source files")
    digest = hashlib.sha256()
    for path in paths:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror or error}); set --data.source files") from error
        digest.update(b"%s\0%d\0" % (_key(root, path), len(content)))
        digest.update(content)
    identity = {
        "source": "builtin",
        "python": platform.python_version(),
        "content": digest.hexdigest(),
        "validation_fraction": validation_fraction,
    }
    data_dir = cache_dir / "stdlib" / f"{digest.hexdigest()[:16]}-{validation_fraction}"

    @functools.cache
    def open_builder() -> Any:
        return _build(data_dir, root, validation_fraction)

    return Source(
        name="builtin",
        identity=identity,
        paths=(str(root),),
        size=len(paths),
        has_splits=True,
        documents=lambda rejects: documents_of(
            open_builder(), "text", {"train": "train", "validation": "validation"}, rejects
        ),
    )


def source_files(root: pathlib.Path) -> list[pathlib.Path]:
    """Return the Python source files below ``root``, without tests and the like, in the order of relative paths."""
    kept = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        generated = path.name.startswith("_sysconfigdata") or relative.parts[0].startswith("config-")
        if path.is_file() and not generated and _EXCLUDED_FOLDERS.isdisjoint(relative.parts):
            kept.append(path)
    return sorted(kept, key=lambda path: path.relative_to(root).as_posix())


def _key(root: pathlib.Path, path: pathlib.Path) -> bytes:
    return path.relative_to(root).as_posix().encode()


def _build(data_dir: pathlib.Path, root: pathlib.Path, validation_fraction: float) -> Any:
    with locked(data_dir):
        builder = StdlibText(
            root=root, validation_fraction=validation_fraction, data_dir=data_dir, file_format="array_record"
        )
        # It takes about a second: tfds's own messages and progress bars would only get in the way.
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
        except (RuntimeError, SyntaxError, UnicodeDecodeError) as error:
            reason = " ".join(str(error).split())
            raise DataError(
                f"{root}: cannot be turned into a dataset in {data_dir} ({reason}); {SET_CACHE_DIR}"
            ) from error
    return builder
