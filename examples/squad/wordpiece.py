"""Text to word pieces, each with its place in the text.

Source: arXiv:1810.04805, section 3 (BERT's input); arXiv:1609.08144, section 4.1 (word pieces, longest match first).
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["Piece", "WordPiece"]

PAD, UNKNOWN, START, SEPARATOR, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
LONGEST_WORD = 100  # characters; a longer one is unknown


class Piece(NamedTuple):
    """Number of a word piece, and the characters `text[start:end]` that it stands for."""

    id: int
    start: int
    end: int


class WordPiece:
    """A vocabulary: a list of pieces, in which "##" begins those within a word.

    Args:
        vocabulary: pieces in the order of their numbers; the special ones among them.
        lower: ignore case and accents.

    Raises:
        ValueError: a special piece is missing.
    """

    def __init__(self, vocabulary: Sequence[str], lower: bool = True) -> None:
        self.vocabulary, self.lower = list(vocabulary), lower
        self.ids = {piece: number for number, piece in enumerate(self.vocabulary)}
        missing = [piece for piece in (PAD, UNKNOWN, START, SEPARATOR) if piece not in self.ids]
        if missing:
            raise ValueError(f"vocabulary: {', '.join(missing)} missing")
        self.pad_id, self.start_id, self.separator_id = (self.ids[piece] for piece in (PAD, START, SEPARATOR))

    @classmethod
    def read(cls, path: Path, lower: bool = True) -> WordPiece:
        """Read a `vocab.txt`, one piece a line, such as comes with published models."""
        return cls(path.read_text(encoding="utf-8").splitlines(), lower)

    @classmethod
    def learn(cls, texts: Iterable[str], size: int, lower: bool = True) -> WordPiece:
        """Make a vocabulary of every character and, up to `size` pieces, the words that come more than once."""
        counts = Counter(word for text in texts for word, _ in _words(text, lower))
        characters = sorted({character for word in counts for character in word})
        pieces = [PAD, UNKNOWN, START, SEPARATOR, MASK, *characters, *(f"##{character}" for character in characters)]
        frequent = [word for word, count in counts.most_common() if count > 1 and len(word) > 1]
        return cls(pieces + frequent[: max(0, size - len(pieces))], lower)

    def write(self, path: Path) -> None:
        """Write it as `read` reads it."""
        path.write_text("\n".join(self.vocabulary) + "\n", encoding="utf-8")

    def encode(self, text: str) -> list[Piece]:
        """Return the pieces of `text`; a word with an unknown part is one unknown piece."""
        return [piece for word, places in _words(text, self.lower) for piece in self._cut(word, places)]

    def _cut(self, word: str, places: list[int]) -> list[Piece]:
        pieces: list[Piece] = []
        begin = 0
        while begin < len(word) <= LONGEST_WORD:
            prefix = "##" if begin else ""
            ends = range(len(word), begin, -1)
            end = next((end for end in ends if prefix + word[begin:end] in self.ids), None)
            if end is None:
                break
            pieces.append(Piece(self.ids[prefix + word[begin:end]], places[begin], places[end - 1] + 1))
            begin = end
        if begin < len(word):
            return [Piece(self.ids[UNKNOWN], places[0], places[-1] + 1)]
        return pieces


def _words(text: str, lower: bool) -> list[tuple[str, list[int]]]:
    """Words and single punctuation marks, each character with its place in `text`."""
    words: list[tuple[str, list[int]]] = []
    open_word = False
    for place, original in enumerate(text):
        for character in _plain(original) if lower else original:
            if character.isspace() or unicodedata.category(character) in ("Cc", "Cf"):
                open_word = False
            elif _stands_alone(character):
                words.append((character, [place]))
                open_word = False
            elif open_word:
                word, places = words[-1]
                words[-1] = (word + character, [*places, place])
            else:
                words.append((character, [place]))
                open_word = True
    return words


def _plain(character: str) -> str:
    """In lower case, without accents; may be empty, or more than one character."""
    return "".join(c for c in unicodedata.normalize("NFD", character.lower()) if unicodedata.category(c) != "Mn")


def _stands_alone(character: str) -> bool:
    """Punctuation, ASCII symbols, and characters of scripts without spaces."""
    if character.isascii():
        return not character.isalnum()
    if unicodedata.category(character).startswith("P"):
        return True
    return any(low <= ord(character) <= high for low, high in ((0x3400, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2FA1F)))
