"""How much of a text survives its tokenizer, so that one which does not know the text is noticed before training.

Some tokenizers drop characters that their vocabulary lacks without a word, others put one token in place of each.
Equality would ask too much: many normalise case, accents or spaces on purpose. So characters are only counted.
"""

import unicodedata
from collections.abc import Sequence

from mecefo_jax.data.tokenizer import Tokenizer
from mecefo_jax.errors import DataError

EXPECTED = 0.9
"""Share of the characters below which the loss is worth a warning."""
_REQUIRED = 0.5
_NUM_DOCUMENTS = 100
_HEAD_CHARACTERS = 2000


def recovered_share(tokenizer: Tokenizer, texts: Sequence[str]) -> float:
    """Return the share of the text that comes back when it is encoded and decoded: at most 1.0.

    It is a ratio of counts of characters, spaces aside, over the heads of the first texts; a tokenizer that adds
    characters as well as losing some appears better than it is.

    Args:
      tokenizer: what to try.
      texts: documents, in order.

    Raises:
      DataError: less than half of the text comes back.
    """
    heads = [text[:_HEAD_CHARACTERS] for text in texts[:_NUM_DOCUMENTS]]
    expected = sum(map(_count_characters, heads))
    returned = 0
    for ids in tokenizer.encode_batch(heads):
        known = ids if tokenizer.unknown_id is None else ids[ids != tokenizer.unknown_id]
        returned += _count_characters(tokenizer.decode(known.tolist()))
    share = min(1.0, returned / expected) if expected else 1.0
    if share < _REQUIRED:
        raise DataError(
            f"data.tokenizer: {tokenizer.name} knows only {share:.0%} of the text; set a tokenizer that covers it, "
            "such as --data.tokenizer bpe"
        )
    return share


def _count_characters(text: str) -> int:
    """Count the characters that are neither spaces nor signs of loss, accents composed with their letters."""
    return sum(not character.isspace() and character != "\ufffd" for character in unicodedata.normalize("NFKC", text))
