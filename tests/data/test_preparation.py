"""Prepared data: the same text gives the same data, another setting never gives old data, and damage is named."""

import json
import multiprocessing
import os
import pathlib
import resource
import shutil
from collections.abc import Callable

import numpy as np
import pytest
import tokenizers

from mecefo_jax.config import DataConfig
from mecefo_jax.data import PAD, PreparedData, check_vocabulary, prepare
from mecefo_jax.data.tokenizer import train_bpe
from mecefo_jax.errors import ConfigError, DataError

from .conftest import SEQ_LEN

MakeConfig = Callable[..., DataConfig]


def quiet(config: DataConfig) -> PreparedData:
    return prepare(config, progress=False, log=lambda line: None)


def stream_of(records: object) -> np.ndarray:
    """Join records into the stream that they were cut from."""
    rows = list(records)  # type: ignore[call-overload]
    stream = np.concatenate([rows[0][:1], *(row[1:] for row in rows)])
    return stream[stream != PAD]


def split_at(stream: np.ndarray, bos_id: int) -> list[np.ndarray]:
    assert stream[0] == bos_id
    return np.split(stream, np.flatnonzero(stream == bos_id)[1:])


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_every_document_is_there_once_and_whole(make_config: MakeConfig, corpus: pathlib.Path, tokenizer: str) -> None:
    prepared = quiet(make_config(tokenizer=tokenizer, bpe_vocab_size=300))
    found = {}
    for name, records in (("train", prepared.train), ("validation", prepared.validation)):
        assert all(record.shape == (SEQ_LEN + 1,) and record.dtype == np.int32 for record in records)
        assert all(np.all(record != PAD) for record in list(records)[:-1])
        documents = split_at(stream_of(records), prepared.tokenizer.bos_id)
        found[name] = [prepared.tokenizer.decode(document) for document in documents]
        assert prepared.info["documents"][name] == len(documents)
        assert prepared.info["tokens"][name] == sum(map(len, documents))
        assert prepared.info["sequences"][name] == len(records)
    texts = [path.read_text(encoding="utf-8") for path in sorted(corpus.iterdir())]
    assert sorted(found["train"] + found["validation"]) == sorted(texts)
    assert [text for text in texts if text in found["train"]] == found["train"]
    assert len(found["validation"]) >= 2


def test_a_single_file_gives_both_splits(make_config: MakeConfig, tmp_path: pathlib.Path) -> None:
    text = "".join(f"line {i}\n" for i in range(200))
    (tmp_path / "book.txt").write_text(text)
    lines: list[str] = []
    prepared = prepare(make_config(files=(f"{tmp_path}/book.txt",)), progress=False, log=lines.append)
    parts = [prepared.tokenizer.decode(stream_of(records)) for records in (prepared.train, prepared.validation)]
    assert "".join(parts) == text
    assert abs(len(parts[1]) / len(text) - 0.2) < 0.01
    assert any("last part of each" in line for line in lines)


def test_preparing_again_only_opens(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    first = quiet(make_config())
    monkeypatch.setattr("mecefo_jax.data.preparation._prepare_folder", lambda *_: pytest.fail("prepared twice"))
    second = quiet(make_config())
    assert second.fingerprint == first.fingerprint
    assert second.info == first.info
    np.testing.assert_array_equal(np.stack(list(first.train)), np.stack(list(second.train)))


def test_preparing_elsewhere_gives_the_same_bits(make_config: MakeConfig, tmp_path: pathlib.Path) -> None:
    shutil.copytree(tmp_path / "corpus", tmp_path / "copy")
    for tokenizer in ("bytes", "bpe"):
        first = quiet(make_config(tokenizer=tokenizer))
        second = quiet(
            make_config(tokenizer=tokenizer, files=(f"{tmp_path}/copy/*.txt",), cache_dir=str(tmp_path / "cache2"))
        )
        assert first.fingerprint == second.fingerprint
        for split in ("train", "validation"):
            np.testing.assert_array_equal(np.stack(list(getattr(first, split))), np.stack(list(getattr(second, split))))


def test_whatever_decides_the_tokens_decides_the_fingerprint(
    make_config: MakeConfig, corpus: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(train_bpe(iter(["some text"]), 258).content)
    seen = [
        quiet(make_config()).fingerprint,
        quiet(make_config(seq_len=SEQ_LEN + 1)).fingerprint,
        quiet(make_config(validation_fraction=0.3)).fingerprint,
        quiet(make_config(validation_files=(f"{corpus}/01.txt",))).fingerprint,
        quiet(make_config(files=(f"{corpus}/[1-3]*.txt",))).fingerprint,
        quiet(make_config(tokenizer="bpe")).fingerprint,
        quiet(make_config(tokenizer="bpe", bpe_vocab_size=300)).fingerprint,
        quiet(make_config(tokenizer=str(tokenizer))).fingerprint,
    ]
    tokenizer.write_text(train_bpe(iter(["other text"]), 260).content)
    seen.append(quiet(make_config(tokenizer=str(tokenizer))).fingerprint)
    monkeypatch.setattr("tokenizers.__version__", "0")
    seen.append(quiet(make_config(tokenizer=str(tokenizer))).fingerprint)
    monkeypatch.setattr("mecefo_jax.data.preparation._DOCUMENT_POLICY", "another")
    seen.append(quiet(make_config()).fingerprint)
    (corpus / "00.txt").write_text("changed")
    seen.append(quiet(make_config()).fingerprint)
    assert len(set(seen)) == len(seen)
    assert quiet(make_config(repeat=True, skip_invalid=True)).fingerprint == seen[-1]


def test_data_under_a_wrong_name_is_refused_by_name(make_config: MakeConfig, tmp_path: pathlib.Path) -> None:
    cache = tmp_path / "cache"
    first, second = quiet(make_config()), quiet(make_config(seq_len=4))
    shutil.rmtree(cache / second.fingerprint)
    shutil.copytree(cache / first.fingerprint, cache / second.fingerprint)
    with pytest.raises(DataError, match=f"{second.fingerprint}/meta.json: prepared with a different seq_len"):
        quiet(make_config(seq_len=4))


def test_the_first_tokens_are_logged_each_time(make_config: MakeConfig) -> None:
    for _ in range(2):
        lines: list[str] = []
        prepared = prepare(make_config(), progress=False, log=lines.append)
        first = [256, *b"text 0: "]
        assert prepared.info["first_tokens"] == first
        assert any(str(first) in line and "'text 0: '" in line for line in lines)


def test_skipped_records_are_reported_and_never_pass_silently(make_config: MakeConfig, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "good {i}"}}\n' for i in range(50)) + '42\n{"text": ""}\n')
    strict, lenient = make_config(files=(str(path),)), make_config(files=(str(path),), skip_invalid=True)
    message = rf"{path}:51: not an object .* a number; .*--data.skip_invalid true"
    with pytest.raises(DataError, match=message):
        quiet(strict)
    assert not list((tmp_path / "cache").glob("*/")), "a failed preparation leaves nothing"
    lines: list[str] = []
    prepared = prepare(lenient, progress=False, log=lines.append)
    assert (prepared.info["skipped"], prepared.info["empty_documents"]) == (1, 1)
    assert sum(prepared.info["documents"].values()) == 50
    assert any("Skipped 1 invalid" in line and f"{path}:51" in line for line in lines)
    with pytest.raises(DataError, match=message):
        quiet(strict)


@pytest.mark.parametrize("content", ["", "\n", "42\n", '{"text": ""}\n'])
def test_no_text_at_all_is_refused(make_config: MakeConfig, tmp_path: pathlib.Path, content: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=f"no text to train on .*{path}"):
        quiet(make_config(files=(str(path),), skip_invalid=True))


@pytest.mark.parametrize(("name", "content"), [("b.txt", ""), ("b.jsonl", '{"text": ""}\n'), ("b.jsonl", "")])
def test_held_out_files_without_text_are_named(
    make_config: MakeConfig, tmp_path: pathlib.Path, name: str, content: str
) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(DataError, match=f"^data.validation_files: no text in {path}; name files"):
        quiet(make_config(validation_files=(str(path),)))
    (tmp_path / "c.txt").write_text("some text")
    assert len(quiet(make_config(validation_files=(str(path), f"{tmp_path}/c.txt"))).validation)


def test_a_tokenizer_that_loses_text_is_warned_of_each_time_or_refused(
    make_config: MakeConfig, tmp_path: pathlib.Path
) -> None:
    path, text = tmp_path / "tokenizer.json", tmp_path / "a.txt"
    tokenizers.Tokenizer(tokenizers.models.BPE({"<s>": 0, "a": 1, "b": 2}, [])).save(str(path))
    config = make_config(files=(str(text),), tokenizer=str(path))
    text.write_text("aabx" * 100)
    for _ in range(2):
        lines: list[str] = []
        assert prepare(config, progress=False, log=lines.append).info["recovered"] == pytest.approx(0.75)
        assert any(str(path) in line and "knows only 75% of the text" in line for line in lines)
    text.write_text("ab" * 100)
    lines = []
    assert prepare(config, progress=False, log=lines.append).info["recovered"] == 1.0
    assert not any("knows only" in line for line in lines)
    text.write_text("axyz" * 100)
    with pytest.raises(DataError, match=f"{path} knows only 25% of the text"):
        quiet(config)


def test_a_tokenizer_larger_than_the_model_is_refused_with_both_numbers(make_config: MakeConfig) -> None:
    prepared = quiet(make_config())
    check_vocabulary(prepared, 258)
    check_vocabulary(prepared, 1000)
    with pytest.raises(
        ConfigError, match="model.vocab_size is 257 .* bytes has 258 entries; set --model.vocab_size 258"
    ):
        check_vocabulary(prepared, 257)


def test_damaged_prepared_data_is_named(make_config: MakeConfig, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "cache" / quiet(make_config()).fingerprint
    for name, reason in (("train-00000.array_record", "bytes"), ("meta.json", "cannot be read")):
        path = folder / name
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        with pytest.raises(DataError, match=f"{path}: .*{reason}.*delete {folder}"):
            quiet(make_config())
        path.write_bytes(content)
    quiet(make_config())


def test_what_a_killed_preparation_left_is_replaced(make_config: MakeConfig, tmp_path: pathlib.Path) -> None:
    fingerprint = quiet(make_config()).fingerprint
    folder = tmp_path / "cache" / fingerprint
    expected = sorted(path.name for path in folder.iterdir())
    left = folder.with_name(f"{fingerprint}.tmp")
    folder.rename(left)
    (left / "train-00007.array_record").write_bytes(b"half")
    quiet(make_config())
    assert not left.exists()
    assert sorted(path.name for path in folder.iterdir()) == expected


def test_a_cache_that_cannot_be_written_is_a_clear_error(make_config: MakeConfig, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="cannot be prepared in .*set --data.cache_dir"):
        quiet(make_config(cache_dir=str(tmp_path / "file" / "cache")))


@pytest.mark.parametrize("source", ["files", "builtin"])
def test_a_full_disk_is_a_clear_error(make_config: MakeConfig, tmp_path: pathlib.Path, source: str) -> None:
    (tmp_path / "big.txt").write_text("0123456789" * 10_000)
    config = make_config(source=source, files=(f"{tmp_path}/big.txt",))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # writing more fails, as on a full disk
    try:
        with pytest.raises(DataError, match=f"{tmp_path}/cache.*; set --data.cache_dir to a folder") as caught:
            quiet(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(caught.value)


def test_unreadable_settings_do_not_blame_the_cache(make_config: MakeConfig) -> None:
    for changes in ({"tokenizer": "a" * 300}, {"files": ("a" * 300,)}, {"files": ("~no-such-user/a.txt",)}):
        with pytest.raises((ConfigError, DataError), match=f"^data.{next(iter(changes))}: ") as caught:
            quiet(make_config(**changes))
        assert "cache_dir" not in str(caught.value)


@pytest.mark.parametrize("source", ["files", "builtin"])
def test_a_tilde_without_such_a_user_is_a_name(
    make_config: MakeConfig, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    prepared = quiet(make_config(source=source, files=(f"{tmp_path}/corpus/*.txt",), cache_dir="~no-such-user/cache"))
    assert (tmp_path / "~no-such-user" / "cache" / prepared.fingerprint / "meta.json").is_file()


def test_log_lines_are_ascii(make_config: MakeConfig, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "na\u00efve.jsonl"
    path.write_text('42\n{"text": "\u6570\u5b66"}\n' * 3, encoding="utf-8")
    lines: list[str] = []
    config = make_config(files=(str(path),), skip_invalid=True, cache_dir=str(tmp_path / "cach\u00e9"))
    prepare(config, progress=False, log=lines.append)
    assert all(line.isascii() for line in lines)
    assert any(r"'\u6570'" in line for line in lines)
    assert any(r"na\xefve.jsonl:1" in line for line in lines)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), BrokenPipeError(), ValueError("closed")])
def test_a_log_that_cannot_be_written_costs_nothing(make_config: MakeConfig, error: Exception) -> None:
    def failing(line: str) -> None:
        raise error

    assert len(prepare(make_config(), progress=False, log=failing).train)


def test_a_log_that_is_wrong_is_not_hidden(make_config: MakeConfig) -> None:
    with pytest.raises(TypeError):
        prepare(make_config(), progress=False, log=lambda: None)  # type: ignore[arg-type, misc]


def _prepare_in_process(config: DataConfig, results: "multiprocessing.Queue[tuple[str, list[str]]]") -> None:
    lines: list[str] = []
    results.put((prepare(config, progress=False, log=lines.append).fingerprint, lines))


@pytest.mark.slow
def test_of_processes_that_start_together_one_prepares(make_config: MakeConfig, tmp_path: pathlib.Path) -> None:
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[tuple[str, list[str]]] = context.Queue()
    config = make_config(tokenizer="bpe", bpe_vocab_size=2000)
    processes = [context.Process(target=_prepare_in_process, args=(config, results)) for _ in range(3)]
    for process in processes:
        process.start()
    found = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    assert len({fingerprint for fingerprint, _ in found}) == 1
    assert sum(any(line.startswith("Prepared") for line in lines) for _, lines in found) == 1
    assert [path.name for path in (tmp_path / "cache").glob("*/")] == [found[0][0]]


def test_info_is_json(make_config: MakeConfig) -> None:
    info = quiet(make_config()).info
    assert json.loads(json.dumps(info)) == info
    assert info["paths"] == sorted(info["paths"])
    assert os.path.isdir(info["folder"])


def test_the_builtin_text_is_prepared(tmp_path: pathlib.Path) -> None:
    prepared = quiet(DataConfig(cache_dir=str(tmp_path), seq_len=256))
    assert len(prepared.train) * 256 > 8e6
    assert 0.01 < len(prepared.validation) / len(prepared.train) < 0.12
    assert "__future__" in prepared.tokenizer.decode(stream_of([prepared.train[i] for i in range(20)]))
