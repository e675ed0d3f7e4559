"""Characters as numbers."""

import string

from hypothesis import given
from hypothesis import strategies as st

from hookline.jobs.vocabulary import Vocabulary

PRINTABLE = string.digits + string.ascii_letters + string.punctuation + " \n\t"


@given(st.text(alphabet=PRINTABLE))
def test_known_text_survives_the_round_trip(text: str) -> None:
    """Text made of the vocabulary's characters comes back unchanged."""
    vocab = Vocabulary(PRINTABLE)
    assert vocab.decode(vocab.encode(text)) == text


@given(st.text())
def test_any_text_can_be_encoded(text: str) -> None:
    """Every character gets one number inside the vocabulary, whatever it is."""
    vocab = Vocabulary("abc")
    ids = vocab.encode(text)
    assert len(ids) == len(text)
    assert all(0 <= number < len(vocab) for number in ids)


def test_unknown_characters_share_one_symbol() -> None:
    """Characters outside the vocabulary become number 0, which decodes to U+FFFD."""
    vocab = Vocabulary("ab")
    assert vocab.encode("aéb\u2028") == [1, 0, 2, 0]
    assert vocab.decode([1, 0]) == "a\ufffd"


def test_only_printable_ascii_is_learnt_from_a_text() -> None:
    """Building from a text keeps printable ASCII, newline and tab, and leaves out the rest."""
    vocab = Vocabulary.of_text("a\tb\né\r\x0c\x00\x7f")
    assert vocab.symbols == ("\ufffd", "\t", "\n", "a", "b")


def test_whole_ascii_gives_98_symbols() -> None:
    """The largest vocabulary has 95 printable characters, newline, tab and the unknown symbol."""
    assert len(Vocabulary.of_text("".join(map(chr, range(1000))))) == 98


def test_order_of_the_text_does_not_matter() -> None:
    """Two texts of the same characters give the same numbers."""
    assert Vocabulary.of_text("hello").symbols == Vocabulary.of_text("ollleh").symbols


def test_the_replacement_character_itself_is_the_unknown_symbol() -> None:
    """Passing U+FFFD among the characters does not list it twice."""
    vocab = Vocabulary("a\ufffd")
    assert len(vocab) == 2
    assert vocab.encode("\ufffd") == [0]
