"""Local files: what is read, and how invalid and damaged ones are refused."""

import gzip
import json
import os
import pathlib
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mecefo_jax.config import DataConfig
from mecefo_jax.data.documents import Rejects, Source
from mecefo_jax.data.files import content_hashes, expand, files_source
from mecefo_jax.errors import ConfigError, DataError

INVALID = {
    b'"context"': 'not an object with a field "text" but a string',
    b"42": 'not an object with a field "text" but a number',
    b"true": 'not an object with a field "text" but a boolean',
    b"null": 'not an object with a field "text" but null',
    b'["text"]': 'not an object with a field "text" but a list',
    b"{}": 'no field "text"',
    b'{"text": null}': 'field "text" is not a string but null',
    b'{"text": 1.5}': 'field "text" is not a string but a number',
    b'{"text": ["a"]}': 'field "text" is not a string but a list',
    b"": "empty line",
    b"  \t": "empty line",
    b'{"text": "cut': "not JSON",
    b"[" * 100_000: "not JSON",
    b'{"text": ' + b"9" * 5000 + b"}": "not JSON",
    b'{"text": "\\ud83d"}': 'field "text" holds half a surrogate pair at character 0',
    '{"text": "ab\u6570'.encode()[:-1]: r"not UTF-8 \(invalid continuation byte at byte 12\)",
    b'{"text": "\xff"}': r"not UTF-8 \(invalid start byte at byte 10\)",
}


def open_source(folder: pathlib.Path, *patterns: str, validation: tuple[str, ...] = ()) -> Source:
    config = DataConfig(
        source="files",
        files=tuple(str(folder / pattern) for pattern in patterns),
        validation_files=tuple(str(folder / pattern) for pattern in validation),
    )
    return files_source(config, folder / "hashes")


def texts_of(source: Source, rejects: Rejects | None = None) -> list[str]:
    return [document.text for document in source.documents(rejects or Rejects(skip=False))]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "c4-train.00000-of-01024.json.gz"])
def test_json_lines_are_read_back(tmp_path: pathlib.Path, name: str, texts: list[str]) -> None:
    lines = "".join(json.dumps({"text": text, "url": "x"}, ensure_ascii=False) + "\n" for text in texts).encode()
    (tmp_path / name).write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
    assert texts_of(open_source(tmp_path, name)) == texts


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "A.TXT"])
def test_a_text_file_is_one_document_unchanged(tmp_path: pathlib.Path, name: str) -> None:
    text = "one\r\ntwo\n\n\u6570\x00 \u2028 end"
    content = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert texts_of(open_source(tmp_path, name)) == [text]


def test_byte_order_marks_and_line_ends_of_other_systems(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "two"}\r\n{"text": "three"}')
    assert texts_of(open_source(tmp_path, "*")) == ["one", "two", "three"]


@pytest.mark.parametrize("line", INVALID, ids=lambda line: repr(line[:20]))
def test_an_invalid_line_is_named_with_its_number_and_reason(tmp_path: pathlib.Path, line: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "also good"}\n')
    with pytest.raises(DataError, match=f"^{path}:2: {INVALID[line]}") as caught:
        texts_of(open_source(tmp_path, "a.jsonl"))
    assert "\n" not in str(caught.value)


def test_invalid_lines_are_skipped_and_counted_if_asked(tmp_path: pathlib.Path) -> None:
    good = [f"good {i}" for i in range(len(INVALID))]
    lines = b"".join(
        b"%s\n%s\n" % (bad, json.dumps({"text": g}).encode()) for bad, g in zip(INVALID, good, strict=True)
    )
    (tmp_path / "a.jsonl").write_bytes(lines + '{"text": "\u6570'.encode()[:-1])
    rejects = Rejects(skip=True)
    assert texts_of(open_source(tmp_path, "a.jsonl"), rejects) == good
    assert rejects.count == len(INVALID) + 1
    assert rejects.examples[0] == (f"{tmp_path}/a.jsonl:1", 'not an object with a field "text" but a string')


def test_a_text_file_in_another_encoding_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.txt").write_bytes("na\u00efve".encode("latin-1"))
    with pytest.raises(DataError, match=r"a.txt: not UTF-8 \(.* at byte 2\)"):
        texts_of(open_source(tmp_path, "a.txt"))
    rejects = Rejects(skip=True)
    assert texts_of(open_source(tmp_path, "a.txt"), rejects) == []
    assert rejects.count == 1


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.gz"])
@pytest.mark.parametrize("keep", [0, 5, 0.3, 0.9, -1])
@pytest.mark.parametrize("skip", [False, True])
def test_a_gzip_file_cut_short_is_named(tmp_path: pathlib.Path, name: str, keep: float, skip: bool) -> None:
    content = gzip.compress(b"".join(b'{"text": "%s"}\n' % os.urandom(20).hex().encode() for _ in range(500)))
    (tmp_path / name).write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    with pytest.raises(DataError, match=f"{name}: gzip file cut short or damaged"):
        texts_of(open_source(tmp_path, name), Rejects(skip))


def test_damaged_and_mislabelled_gzip_files_are_named(tmp_path: pathlib.Path) -> None:
    content = bytearray(gzip.compress(os.urandom(2000)))
    content[1000] ^= 0xFF
    (tmp_path / "a.txt.gz").write_bytes(content)
    (tmp_path / "b.txt.gz").write_bytes(b"plain text")
    for name in ("a.txt.gz", "b.txt.gz"):
        with pytest.raises(DataError, match=f"{name}: gzip file cut short or damaged"):
            texts_of(open_source(tmp_path, name))


def test_patterns_name_each_file_once_in_order(tmp_path: pathlib.Path) -> None:
    for name in ("b.txt", "a.txt", "deep/er/c.txt", "[x].txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    patterns = [str(tmp_path / p) for p in ("b.txt", "[x].txt", "*.txt", "**/c.txt")]
    assert [path.name for path in expand(patterns, "data.files")] == ["b.txt", "[x].txt", "a.txt", "c.txt"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("none-*.txt", "data.files: no file matches '.*none-.*"),
        ("missing.txt", "data.files: no file matches"),
        ("folder", "is a folder; name its files"),
        ("*", "picture.png is neither"),
    ],
)
def test_patterns_that_name_no_text_are_refused(tmp_path: pathlib.Path, pattern: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "picture.png").write_bytes(b"")
    with pytest.raises(DataError, match=message):
        expand([str(tmp_path / pattern)], "data.files")


def test_no_pattern_at_all_is_a_wrong_setting(make_config: Callable[..., DataConfig]) -> None:
    with pytest.raises(ConfigError, match="data.files"):
        make_config(files=())


def test_validation_files_are_held_out_even_if_named_twice(tmp_path: pathlib.Path) -> None:
    for name in ("c4-train.0.json", "c4-train.1.json", "c4-validation.0.json"):
        (tmp_path / name).write_text(json.dumps({"text": name}))
    source = open_source(tmp_path, "*.json", validation=("c4-validation*",))
    splits = {document.text: document.split for document in source.documents(Rejects(skip=False))}
    assert splits == {"c4-train.0.json": "train", "c4-train.1.json": "train", "c4-validation.0.json": "validation"}
    with pytest.raises(DataError, match="holds out every file"):
        open_source(tmp_path, "c4-val*.json", validation=("*.json",))


def test_positions_rise_to_the_size(corpus: pathlib.Path) -> None:
    source = open_source(corpus, "*.txt")
    positions = [document.position for document in source.documents(Rejects(skip=False))]
    assert positions == sorted(positions)
    assert positions[-1] == source.size == sum(path.stat().st_size for path in corpus.glob("*.txt"))


def test_hashes_follow_the_content(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = tmp_path / "a.txt", tmp_path / "hashes"
    path.write_text("one")
    (first,) = content_hashes([path], cache)
    assert not cache.exists()  # just written: its times cannot be trusted yet
    path.write_text("two")
    (second,) = content_hashes([path], cache)
    assert first != second
    monkeypatch.setattr("mecefo_jax.data.files._SETTLED_SECONDS", -1.0)
    assert content_hashes([path], cache) == [second]
    with monkeypatch.context() as patch:
        patch.setattr("hashlib.file_digest", lambda *_: pytest.fail("read again"))
        assert content_hashes([path], cache) == [second]
    path.write_text("three")
    (third,) = content_hashes([path], cache)
    assert third != second
    cache.write_text("{ damaged")
    assert content_hashes([path], cache) == [third]
    assert content_hashes([path], tmp_path / "nowhere" / "hashes") == [third]
