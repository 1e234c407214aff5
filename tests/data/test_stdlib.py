"""The standard library's source as a dataset: what is in it, and that it needs no TensorFlow."""

import pathlib
import sys
import sysconfig

import pytest

from mecefo_jax.data.documents import Rejects, Source
from mecefo_jax.data.stdlib import source_files, stdlib_source
from mecefo_jax.errors import DataError


@pytest.fixture
def library(tmp_path: pathlib.Path) -> pathlib.Path:
    root = tmp_path / "lib"
    for i in range(30):
        path = root / f"package{i % 3}" / f"module{i:02d}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# module {i} na\u00efve\n", encoding="utf-8")
    (root / "latin.py").write_bytes("# coding: latin-1\n# na\u00efve\n".encode("latin-1"))
    for left_out in ("test/a.py", "x/tests/a.py", "idlelib/idle_test/a.py", "site-packages/a.py", "config-3/a.py"):
        (root / left_out).parent.mkdir(parents=True)
        (root / left_out).write_text("left out")
    (root / "_sysconfigdata__linux.py").write_text("left out")
    return root


def splits_of(source: Source) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"train": [], "validation": []}
    for document in source.documents(Rejects(skip=False)):
        assert document.split is not None
        found[document.split].append(document.text)
    return found


def test_every_file_is_in_one_split_in_order(library: pathlib.Path, tmp_path: pathlib.Path) -> None:
    source = stdlib_source(tmp_path / "cache", 0.3, library)
    found = splits_of(source)
    modules = [f"# module {i} na\u00efve\n" for i in range(30)]
    assert sorted(found["train"] + found["validation"]) == sorted([*modules, "# coding: latin-1\n# na\u00efve\n"])
    assert 3 <= len(found["validation"]) <= 16  # 31 draws at 0.3: within 2.6 standard deviations
    for texts in found.values():
        by_path = [text for text in texts if "module" in text]
        assert by_path == sorted(by_path, key=lambda text: (int(text.split()[2]) % 3, int(text.split()[2])))
    assert source.size == 31
    assert "tensorflow" not in sys.modules


def test_the_split_of_a_file_depends_on_its_path_alone(library: pathlib.Path, tmp_path: pathlib.Path) -> None:
    before = splits_of(stdlib_source(tmp_path / "cache", 0.3, library))
    (library / "package0" / "module00.py").unlink()
    after = splits_of(stdlib_source(tmp_path / "cache", 0.3, library))
    for split, texts in before.items():
        assert after[split] == [text for text in texts if text != "# module 0 na\u00efve\n"]


def test_identity_follows_content_names_and_fraction(library: pathlib.Path, tmp_path: pathlib.Path) -> None:
    def identity(fraction: float = 0.3) -> str:
        return str(stdlib_source(tmp_path / "cache", fraction, library).identity)

    seen = [identity()]
    assert identity() == seen[0]
    seen.append(identity(0.2))
    (library / "latin.py").rename(library / "renamed.py")
    seen.append(identity())
    (library / "renamed.py").write_text("changed")
    seen.append(identity())
    assert len(set(seen)) == 4


def test_changed_files_are_read_anew(library: pathlib.Path, tmp_path: pathlib.Path) -> None:
    splits_of(stdlib_source(tmp_path / "cache", 0.3, library))
    (library / "latin.py").write_text("changed")
    assert "changed" in sum(splits_of(stdlib_source(tmp_path / "cache", 0.3, library)).values(), [])


def test_a_dataset_cut_short_is_named(library: pathlib.Path, tmp_path: pathlib.Path) -> None:
    splits_of(stdlib_source(tmp_path / "cache", 0.3, library))
    path = next((tmp_path / "cache").rglob("*train.array_record*"))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=f"{path}: cut short or damaged"):
        splits_of(stdlib_source(tmp_path / "cache", 0.3, library))


def test_a_python_without_its_source_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(DataError, match="no Python source files"):
        stdlib_source(tmp_path / "cache", 0.3, tmp_path)


def test_unreadable_source_is_refused_by_name(library: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (library / "bad.py").write_bytes(b"# \xff\xfe\n")
    with pytest.raises(DataError, match="cannot be turned into a dataset"):
        splits_of(stdlib_source(tmp_path / "cache", 0.3, library))


def test_this_python_has_enough_text_and_no_tests() -> None:
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    paths = source_files(root)
    assert sum(path.stat().st_size for path in paths) > 8e6
    assert not [path for path in paths if {"test", "tests"} & set(path.relative_to(root).parts)]
    assert root / "argparse.py" in paths
