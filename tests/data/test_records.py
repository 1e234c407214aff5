"""What is written is what is read, from memory or from disk; damage is an error that names the file."""

import pathlib

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mecefo_jax.data.records import RecordFile, Records, RecordWriter, token_dtype
from mecefo_jax.errors import DataError
from mecefo_jax.padding import PAD

SEQ_LEN = 4


def write(folder: pathlib.Path, tokens: np.ndarray, vocab_size: int = 258, per_file: int = 3) -> list[RecordFile]:
    writer = RecordWriter(folder, "train", seq_len=SEQ_LEN, vocab_size=vocab_size, records_per_file=per_file)
    for piece in np.array_split(tokens, 3):
        writer.write(piece)
    return writer.close()


@pytest.mark.parametrize("in_memory_bytes", [0, 2**20], ids=["disk", "memory"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
@given(num_tokens=st.integers(2, 70), vocab_size=st.sampled_from([258, 2**16, 2**16 + 1, 2**20]))
def test_round_trip(tmp_path: pathlib.Path, in_memory_bytes: int, num_tokens: int, vocab_size: int) -> None:
    tokens = np.random.default_rng(num_tokens).integers(0, vocab_size, num_tokens, np.int32)
    files = write(tmp_path, tokens, vocab_size)
    records = Records(tmp_path, files, seq_len=SEQ_LEN, vocab_size=vocab_size, in_memory_bytes=in_memory_bytes)
    assert len(records) == -(-(num_tokens - 1) // SEQ_LEN)
    assert len(files) == -(-len(records) // 3)
    padded = np.append(tokens, np.full(SEQ_LEN, PAD, np.int32))
    for i, record in enumerate(records):
        assert record.dtype == np.int32
        np.testing.assert_array_equal(record, padded[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1])


def test_the_largest_id_fits_the_stored_dtype() -> None:
    for vocab_size in (1, 2**16, 2**16 + 1, 2**31):
        assert np.iinfo(token_dtype(vocab_size)).max >= vocab_size - 1


def test_records_can_be_changed_without_changing_the_data(tmp_path: pathlib.Path) -> None:
    records = Records(tmp_path, write(tmp_path, np.arange(20, dtype=np.int32)), seq_len=SEQ_LEN, vocab_size=258)
    records[1][:] = 0
    np.testing.assert_array_equal(records[1], [4, 5, 6, 7, 8])


def test_an_empty_split_has_no_records(tmp_path: pathlib.Path) -> None:
    records = Records(tmp_path, [], seq_len=SEQ_LEN, vocab_size=258)
    assert len(records) == 0
    with pytest.raises(IndexError):
        records[0]


@pytest.mark.parametrize("in_memory_bytes", [0, 2**20], ids=["disk", "memory"])
@pytest.mark.parametrize("keep", [0, 1, 0.5, -1], ids=["nothing", "a byte", "half", "all but a byte"])
def test_a_file_cut_short_is_named(tmp_path: pathlib.Path, in_memory_bytes: int, keep: float) -> None:
    files = write(tmp_path, np.arange(40, dtype=np.int32))
    path = tmp_path / files[1].name
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    with pytest.raises(DataError, match=rf"{path}: \d+ bytes, but {len(content)} were written"):
        Records(tmp_path, files, seq_len=SEQ_LEN, vocab_size=258, in_memory_bytes=in_memory_bytes)


def test_a_missing_file_is_named(tmp_path: pathlib.Path) -> None:
    files = write(tmp_path, np.arange(40, dtype=np.int32))
    (tmp_path / files[2].name).unlink()
    with pytest.raises(DataError, match=rf"{files[2].name}: missing"):
        Records(tmp_path, files, seq_len=SEQ_LEN, vocab_size=258)


@pytest.mark.parametrize("in_memory_bytes", [0, 2**20], ids=["disk", "memory"])
def test_a_damaged_file_is_named(tmp_path: pathlib.Path, in_memory_bytes: int) -> None:
    tokens = np.full(40, 0x55, np.int32)
    files = write(tmp_path, tokens, per_file=100)
    path = tmp_path / files[0].name
    content = bytearray(path.read_bytes())
    content[content.index(b"\x55\x00" * (SEQ_LEN + 1))] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"{path}: damaged"):
        list(Records(tmp_path, files, seq_len=SEQ_LEN, vocab_size=258, in_memory_bytes=in_memory_bytes))


@pytest.mark.parametrize("in_memory_bytes", [0, 2**20], ids=["disk", "memory"])
def test_a_token_outside_the_vocabulary_is_refused_with_both_numbers(
    tmp_path: pathlib.Path, in_memory_bytes: int
) -> None:
    path = tmp_path / "train-00000.array_record"
    writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    for record in ([1, 2, 3, 4, 5], [5, 6, 258, 7, 8], [8, 9]):
        writer.write(np.array(record, "<u2").tobytes())
    writer.close()
    files = [RecordFile(path.name, path.stat().st_size, 3)]
    with pytest.raises(DataError, match="record 1 holds token 258, but the tokenizer has 258 entries"):
        list(Records(tmp_path, files, seq_len=SEQ_LEN, vocab_size=258, in_memory_bytes=in_memory_bytes))


def test_a_full_disk_is_reported_with_the_file() -> None:
    writer = RecordWriter(pathlib.Path("/dev/full/none"), "train", seq_len=SEQ_LEN, vocab_size=258)
    with pytest.raises(DataError, match="train-00000.array_record: cannot be written"):
        writer.write(np.arange(20, dtype=np.int32))
        writer.close()
