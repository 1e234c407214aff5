"""Tokenizers as Hugging Face's ``AutoTokenizer`` reads them: ``tokenizer.json`` and ``tokenizer_config.json``."""

import functools
import json
import pathlib

import tokenizers

from mecefo_jax.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, read_tokenizer
from mecefo_jax.errors import DataError

FILE_NAME = "tokenizer.json"
_CONFIG_NAME = "tokenizer_config.json"
_BOS, _EOS = "<s>", "</s>"


def write_tokenizer(folder: pathlib.Path, tokenizer: Tokenizer, max_length: int) -> None:
    """Write a tokenizer that encodes as ours does, also where text spells out a special token.

    Args:
        folder: where; it exists.
        tokenizer: ours.
        max_length: longest sequence of its model, in tokens.
    """
    content = tokenizer.content if isinstance(tokenizer, HuggingFaceTokenizer) else byte_content()
    (folder / FILE_NAME).write_text(content, encoding="utf-8")
    model = tokenizers.Tokenizer.from_str(content)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": model.id_to_token(tokenizer.bos_id),
        "eos_token": model.id_to_token(tokenizer.eos_id),
        "split_special_tokens": True,  # text is text: <s> in a document does not begin another one
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    (folder / _CONFIG_NAME).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def read_pretrained_tokenizer(folder: pathlib.Path) -> Tokenizer:
    """The tokenizer of a folder; the one that ``write_tokenizer`` makes of bytes is recognized.

    Raises:
        DataError: there is no ``tokenizer.json``, or it is damaged.
        ConfigError: it has no token to begin documents with.
    """
    if not (folder / FILE_NAME).exists():
        raise DataError(
            f"{folder}: holds no {FILE_NAME}; AutoTokenizer.from_pretrained(...).save_pretrained(...) makes one"
        )
    tokenizer = read_tokenizer(str(folder))
    return ByteTokenizer() if tokenizer.content == byte_content() else tokenizer


@functools.cache
def byte_content() -> str:
    """A ``tokenizer.json`` whose ids 0-255 are the bytes of the text, 256 BOS and 257 EOS."""
    vocabulary = {character: byte for byte, character in enumerate(_characters_of_bytes())}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.pre_tokenizer = byte_level  # type: ignore[assignment]
    model.decoder = tokenizers.decoders.ByteLevel()  # type: ignore[assignment]
    model.add_special_tokens([_BOS, _EOS])
    return model.to_str()


def _characters_of_bytes() -> list[str]:
    """The character by which byte-level tokenizers write each byte (GPT-2): itself if it can be seen, or one above."""
    visible = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte if byte in visible else 256 + hidden.index(byte)) for byte in range(256)]
