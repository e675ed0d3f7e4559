"""The demo's data: the source text of Python's standard library as batches of characters. Nothing is downloaded."""

from __future__ import annotations

import string
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset

from hookline.errors import HooklineError
from hookline.ranks import rank_and_world_size
from hookline.trainer.data.sampler import ShareOf

VALIDATION_BATCHES = 20
# Tests are skipped, as is the file that the interpreter's build writes, because it differs between machines.
_SKIPPED_PREFIXES = ("test", "_sysconfigdata")

_CHARACTERS = frozenset(string.digits + string.ascii_letters + string.punctuation + " \n\t")

Batch = dict[str, Tensor]


class Vocabulary:
    """Maps the characters of a string that are printable ASCII, newline or tab to ids; all others share the id 0.

    >>> vocab = Vocabulary("abba")
    >>> vocab.encode("bay")
    [2, 1, 0]
    >>> vocab.decode([2, 1])
    'ba'
    """

    UNKNOWN = "\N{REPLACEMENT CHARACTER}"

    def __init__(self, text: str) -> None:
        self.symbols = (self.UNKNOWN, *sorted(_CHARACTERS.intersection(text)))
        self._ids = {symbol: number for number, symbol in enumerate(self.symbols)}

    def __len__(self) -> int:
        return len(self.symbols)

    def encode(self, text: str) -> list[int]:
        """Return one id per character."""
        unknown = self._ids[self.UNKNOWN]
        return [self._ids.get(character, unknown) for character in text]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the given ids; unknown characters come out as U+FFFD."""
        return "".join(self.symbols[number] for number in ids)


class Windows(Dataset[Batch]):
    """Text in windows of `context` characters; the labels are the same window one character later."""

    def __init__(self, ids: Tensor, context: int) -> None:
        self.ids = ids
        self.context = context

    def __len__(self) -> int:
        return max(0, (len(self.ids) - 1) // self.context)

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.context
        piece = self.ids[start : start + self.context + 1]
        return {"input_ids": piece[:-1], "labels": piece[1:]}


@dataclass(frozen=True)
class TextData:
    """The data of a job: shuffled training batches, fixed validation batches, and the vocabulary."""

    train: DataLoader[Batch]
    validation: DataLoader[Batch]
    vocab: Vocabulary


def stdlib_text(
    context: int = 128,
    batch_size: int = 16,
    max_bytes: int = 2_000_000,
    validation_fraction: float = 0.1,
    seed: int = 0,
    path: str | None = None,
    pattern: str = "*.py",
    vocab: Vocabulary | None = None,
) -> TextData:
    """Read source text and serve it as batches `{"input_ids", "labels"}`, both [batch_size, context].

    Files are read in sorted order. Whole files are held out for validation, independent of the seed, and at most 20
    batches are taken from them, evenly spread. With a single file, its end is held out. Takes a fraction of a second.
    With several processes each gets its share of both, in batches of this size.

    Args:
        context: Characters in a window.
        batch_size: Windows in a batch.
        max_bytes: How much text to read.
        validation_fraction: The share of files to hold out.
        seed: Determines the order of the training windows, which is the same in all processes. The loader has its own
            generator and never draws from the global one.
        path: A directory to read instead of the standard library's top-level modules.
        pattern: Which files of the directory to read.
        vocab: The vocabulary of other data, for a model that was trained on it; built from the training text by
            default.

    Raises:
        HooklineError: If no file matches, or there is too little text for one batch.
    """
    if not 0 < validation_fraction < 1:
        raise HooklineError(f"validation_fraction={validation_fraction} must be between 0 and 1")
    texts = _read_texts(path, pattern, max_bytes)
    train_text, validation_text = _hold_out(texts, validation_fraction)
    vocab = vocab or Vocabulary(train_text)
    train = Windows(torch.tensor(vocab.encode(train_text)), context)
    validation = Windows(torch.tensor(vocab.encode(validation_text)), context)
    rank, world_size = rank_and_world_size()
    if len(train) < batch_size * world_size or len(validation) < world_size:
        raise HooklineError(
            f"too little text: {len(train)} training and {len(validation)} validation windows of "
            f"{context} characters, but {batch_size * world_size} (one batch) and {world_size} are the least; "
            "use a smaller context or batch_size, a larger max_bytes, or more files (data.path, data.pattern)"
        )
    generator = torch.Generator().manual_seed(seed)
    # Also with one process, so that several can continue a run that it began.
    order = ShareOf(RandomSampler(train, generator=generator), rank, world_size)
    shuffled = DataLoader(train, batch_size, sampler=order, drop_last=True, generator=generator)
    # Even spacing takes windows from every held-out file. A loader draws a seed at every pass, even without shuffling;
    # its own generator spares the global one.
    count = min(len(validation), VALIDATION_BATCHES * batch_size)
    fixed = Subset(validation, [i * len(validation) // count for i in range(rank, count, world_size)])
    return TextData(shuffled, DataLoader(fixed, batch_size, generator=torch.Generator()), vocab)


def _read_texts(path: str | None, pattern: str, max_bytes: int) -> list[str]:
    """Read files, sorted by name so that every run reads the same, up to `max_bytes`; the last may be cut short."""
    directory = Path(path if path is not None else sysconfig.get_path("stdlib"))
    files = sorted(file for file in directory.glob(pattern) if file.is_file())
    if path is None:
        files = [file for file in files if not file.name.startswith(_SKIPPED_PREFIXES)]
    if not files:
        source = "the standard library's directory" if path is None else "data.path"
        raise HooklineError(
            f"no file matches {pattern!r} in {directory} ({source}); "
            "set data.path=DIR to a directory of text files, and data.pattern if they are not *.py"
        )
    texts = []
    for file in files:
        if max_bytes <= 0:
            break
        with file.open("rb") as stream:
            content = stream.read(max_bytes)
        max_bytes -= len(content)
        texts.append(content.decode("utf-8", errors="ignore"))
    return texts


def _hold_out(texts: list[str], fraction: float) -> tuple[str, str]:
    """Split by file into training and validation text: with 0.1, every tenth file is held out."""
    if len(texts) == 1:
        cut = round(len(texts[0]) * (1 - fraction))
        return texts[0][:cut], texts[0][cut:]
    held_out = [int((i + 1) * fraction) > int(i * fraction) for i in range(len(texts))]
    if not any(held_out):
        held_out[-1] = True
    parts = [[text for text, held in zip(texts, held_out, strict=True) if held is part] for part in (False, True)]
    return "\n".join(parts[0]), "\n".join(parts[1])
