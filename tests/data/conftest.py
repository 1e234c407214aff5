"""Small texts to prepare data from."""

import pathlib
from collections.abc import Callable

import pytest

from mecefo_jax.config import DataConfig

SEQ_LEN = 8


@pytest.fixture
def corpus(tmp_path: pathlib.Path) -> pathlib.Path:
    """Make a folder of 40 short texts, each of another length, some with characters of several bytes."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02d}.txt").write_text(f"text {i}: " + "na\u00efve \u6570 " * (i % 7) + "x" * i, encoding="utf-8")
    return folder


@pytest.fixture
def make_config(tmp_path: pathlib.Path, corpus: pathlib.Path) -> Callable[..., DataConfig]:
    """Make data sections that read the corpus and keep prepared data in the test's own folder."""

    def make(**changes: object) -> DataConfig:
        fields: dict[str, object] = {
            "source": "files",
            "files": (f"{corpus}/*.txt",),
            "seq_len": SEQ_LEN,
            "validation_fraction": 0.2,
            "cache_dir": str(tmp_path / "cache"),
        }
        return DataConfig(**(fields | changes))  # type: ignore[arg-type]

    return make
