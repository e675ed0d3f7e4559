"""The data: deterministic, held out by file, and helpful when there is no source to read."""

import string
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hookline import HooklineError
from hookline.demo.stdlib_text import Vocabulary, stdlib_text


@pytest.fixture(scope="module")
def data() -> Any:
    """The standard library's text, less of it than by default."""
    return stdlib_text(context=32, batch_size=4, max_bytes=300_000)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Twenty files, each made of another letter, so that a window shows its file."""
    for number in range(20):
        (tmp_path / f"file{number:02}.txt").write_text("abcdefghijklmnopqrst"[number] * 200)
    return tmp_path


def letters(data: Any, loader: str) -> set[str]:
    """The characters that a loader's dataset can ever show, windows' borders aside."""
    windows = getattr(data, loader).dataset
    return {c for i in range(len(windows)) for c in data.vocab.decode(windows[i]["input_ids"].tolist())}


def test_batches_are_dicts_of_shifted_windows(data: Any) -> None:
    """Each batch holds input_ids and labels of one shape, the labels one character ahead."""
    batch = next(iter(data.train))
    assert set(batch) == {"input_ids", "labels"}
    assert batch["input_ids"].shape == batch["labels"].shape == (4, 32)
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.long
    assert torch.equal(batch["input_ids"][:, 1:], batch["labels"][:, :-1])


def test_text_is_the_standard_library(data: Any) -> None:
    """The training text reads as Python: it decodes to source with the usual words in it."""
    windows = data.train.dataset
    text = "".join(data.vocab.decode(windows[i]["input_ids"].tolist()) for i in range(500))
    assert "import" in text
    assert "return" in text
    assert "    def " in text


def test_vocabulary_is_small(data: Any) -> None:
    """Source text needs most of printable ASCII and nothing beyond."""
    assert 80 <= len(data.vocab) <= 98


def test_two_readings_are_the_same() -> None:
    """The same arguments give the same batches in the same order."""
    first, second = (stdlib_text(context=16, batch_size=2, max_bytes=100_000) for _ in range(2))
    assert first.vocab.symbols == second.vocab.symbols
    for _, one, two in zip(range(10), first.train, second.train, strict=False):
        assert torch.equal(one["input_ids"], two["input_ids"])


def test_seed_orders_training_and_nothing_else() -> None:
    """Another seed shows other windows first, while the validation batches stay as they were."""
    first, second = (stdlib_text(context=16, batch_size=2, max_bytes=100_000, seed=s) for s in (0, 1))
    assert not torch.equal(next(iter(first.train))["input_ids"], next(iter(second.train))["input_ids"])
    for batch, other in zip(first.validation, second.validation, strict=True):
        assert torch.equal(batch["input_ids"], other["input_ids"])


def test_each_epoch_has_its_own_order(data: Any) -> None:
    """Iterating twice gives different first batches: the generator moves on."""
    assert not torch.equal(next(iter(data.train))["input_ids"], next(iter(data.train))["input_ids"])


def test_validation_is_fixed_and_small(data: Any) -> None:
    """Every pass over the validation loader gives the same few batches."""
    assert len(data.validation) == 20
    for batch, again in zip(data.validation, data.validation, strict=True):
        assert torch.equal(batch["input_ids"], again["input_ids"])


def test_loaders_leave_the_global_random_state_alone(data: Any) -> None:
    """Neither starting nor following a pass over a loader draws from torch's global stream."""
    state = torch.get_rng_state()
    for loader in (data.train, data.validation):
        next(iter(loader))
    assert torch.equal(torch.get_rng_state(), state)


def test_held_out_files_are_never_trained_on(files: Path) -> None:
    """Training and validation share no file, and together they cover all of them."""
    data = stdlib_text(context=10, batch_size=1, path=str(files), pattern="*.txt", validation_fraction=0.25)
    train, validation = letters(data, "train") - {"\n"}, letters(data, "validation") - {"\n"}
    # The vocabulary is made of the training text alone, so what is held out reads as unknown here.
    assert len(train) == 15
    assert validation == {data.vocab.UNKNOWN}


def test_every_nth_file_is_held_out(files: Path) -> None:
    """With a fraction of 0.1, two of twenty files are held out: the tenth and the twentieth."""
    data = stdlib_text(context=10, batch_size=1, path=str(files), pattern="*.txt")
    assert set("abcdefghijklmnopqrst") - letters(data, "train") == {"j", "t"}


def test_one_file_is_split_at_its_end(tmp_path: Path) -> None:
    """Of a single file, training gets the beginning and validation the rest."""
    (tmp_path / "only.txt").write_text("a" * 900 + "b" * 100)
    data = stdlib_text(context=10, batch_size=1, path=str(tmp_path), pattern="*.txt")
    assert letters(data, "train") == {"a"}
    assert letters(data, "validation") == {data.vocab.UNKNOWN}


def test_two_files_leave_one_for_validation(tmp_path: Path) -> None:
    """Even where the fraction would round to no file, one is held out."""
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 500)
    data = stdlib_text(context=10, batch_size=1, path=str(tmp_path), pattern="*.txt")
    assert letters(data, "train") == {"a"}


def test_no_more_than_max_bytes_are_read(files: Path) -> None:
    """Reading stops at max_bytes; files beyond are not opened."""
    data = stdlib_text(context=10, batch_size=1, max_bytes=500, path=str(files), pattern="*.txt")
    assert letters(data, "train") <= set("abc\n")


def test_undecodable_bytes_are_ignored(tmp_path: Path) -> None:
    """A file in another encoding loses the bytes that are no UTF-8, nothing else."""
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 300)
    data = stdlib_text(context=10, batch_size=1, path=str(tmp_path), pattern="*.txt")
    assert letters(data, "train") == set("caf ")


def test_pattern_can_reach_into_folders(tmp_path: Path) -> None:
    """A `**` pattern finds files below the directory."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "one.md").write_text("xyz " * 300)
    data = stdlib_text(context=10, batch_size=1, path=str(tmp_path), pattern="**/*.md")
    assert letters(data, "train") == set("xyz ")


def test_tests_and_build_files_of_the_library_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the standard library, test modules and the interpreter's build data are left out."""
    for name, letter in [("good", "g"), ("test_good", "t"), ("_sysconfigdata_linux", "s")]:
        (tmp_path / f"{name}.py").write_text(letter * 500)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert letters(stdlib_text(context=10, batch_size=1), "train") == {"g"}


def test_library_without_source_names_directory_and_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only compiled files are left, the error names the directory and says to set data.path."""
    (tmp_path / "os.pyc").write_bytes(b"\x00")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(HooklineError, match=r"data\.path=DIR") as caught:
        stdlib_text()
    assert str(tmp_path) in str(caught.value)


def test_library_in_a_zip_gives_the_same_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A standard library path that is not a directory gives the same error, not a file system's."""
    (tmp_path / "python.zip").write_bytes(b"PK")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "python.zip"))
    with pytest.raises(HooklineError, match=r"python\.zip.*data\.path=DIR"):
        stdlib_text()


def test_wrong_path_names_pattern_and_directory(tmp_path: Path) -> None:
    """A directory without matching files is named together with the pattern."""
    with pytest.raises(HooklineError, match=r"'\*\.py' in .*nowhere"):
        stdlib_text(path=str(tmp_path / "nowhere"))


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    """Text shorter than one batch gives the numbers and the remedy instead of an epoch of no batches."""
    (tmp_path / "short.py").write_text("x = 1\n" * 20)
    with pytest.raises(HooklineError, match=r"too little text: .* smaller context or batch_size"):
        stdlib_text(path=str(tmp_path))


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5])
def test_validation_fraction_must_leave_both_parts(fraction: float) -> None:
    """Holding out nothing or everything is refused by name."""
    with pytest.raises(HooklineError, match=f"validation_fraction={fraction}"):
        stdlib_text(validation_fraction=fraction)


def test_windows_tile_the_text(tmp_path: Path) -> None:
    """Windows follow each other without gap or overlap, and an index beyond them ends iteration."""
    (tmp_path / "only.txt").write_text("abcdefghij" + "k" * 10)
    data = stdlib_text(3, 1, path=str(tmp_path), pattern="*.txt", validation_fraction=0.5)
    windows = data.train.dataset
    assert [data.vocab.decode(window["input_ids"].tolist()) for window in windows] == ["abc", "def", "ghi"]
    assert data.vocab.decode(windows[2]["labels"].tolist()) == "hij"
    with pytest.raises(IndexError, match="window 3 of 3"):
        windows[3]


def test_an_empty_text_has_no_windows(tmp_path: Path) -> None:
    """A file without text is refused as too short."""
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(HooklineError, match="too little text: 0 training and 0 validation windows"):
        stdlib_text(path=str(tmp_path))


def test_building_is_quick() -> None:
    """The default data takes less than 1.5 s of processor time."""
    start = time.process_time()
    stdlib_text()
    assert time.process_time() - start < 1.5


# ---- the vocabulary ------------------------------------------------------------------------------------------------

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
    vocab = Vocabulary("a\tb\né\r\x0c\x00\x7f")
    assert vocab.symbols == ("\ufffd", "\t", "\n", "a", "b")


def test_whole_ascii_gives_98_symbols() -> None:
    """The largest vocabulary has 95 printable characters, newline, tab and the unknown symbol."""
    assert len(Vocabulary("".join(map(chr, range(1000))))) == 98


def test_order_of_the_text_does_not_matter() -> None:
    """Two texts of the same characters give the same numbers."""
    assert Vocabulary("hello").symbols == Vocabulary("ollleh").symbols


def test_the_replacement_character_itself_is_the_unknown_symbol() -> None:
    """Passing U+FFFD among the characters does not list it twice."""
    vocab = Vocabulary("a\ufffd")
    assert len(vocab) == 2
    assert vocab.encode("\ufffd") == [0]
