"""The default job's data: Python's own standard library, as text. Nothing is downloaded."""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from hookline.errors import HooklineError
from hookline.jobs.vocabulary import Vocabulary

VALIDATION_BATCHES = 20
# Neither tests nor the file that the build of this very interpreter wrote: it differs between machines.
_SKIPPED_PREFIXES = ("test", "_sysconfigdata")

Batch = dict[str, Tensor]


class Windows(Dataset[Batch]):
    """A text cut into windows of `context` characters; the labels are the same window one character later."""

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
    """What a job trains on: shuffled training batches, fixed validation batches, and the vocabulary."""

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
) -> TextData:
    """Read source text and serve it as batches `{"input_ids", "labels"}`, both [batch_size, context].

    Reads the standard library's top-level modules, or the files below `path` that match `pattern`, in sorted
    order up to `max_bytes`. Whole files are held out for validation, the same ones whatever the seed, and at
    most 20 batches are taken from them, spread evenly; of a single file, the end is held out. The seed orders
    the training windows, through a generator of the loader's own: iterating never moves the global random
    state. Takes a fraction of a second.
    """
    if not 0 < validation_fraction < 1:
        raise HooklineError(f"validation_fraction={validation_fraction} must lie between 0 and 1")
    texts = _read_texts(_find_files(path, pattern), max_bytes)
    train_text, validation_text = _hold_out(texts, validation_fraction)
    vocab = Vocabulary.of_text(train_text)
    train = Windows(torch.tensor(vocab.encode(train_text)), context)
    validation = Windows(torch.tensor(vocab.encode(validation_text)), context)
    _check_enough(train, validation, batch_size)
    fixed = Subset(validation, _evenly_spread(len(validation), VALIDATION_BATCHES * batch_size))
    return TextData(_shuffled(train, batch_size, seed), _in_order(fixed, batch_size), vocab)


def _find_files(path: str | None, pattern: str) -> list[Path]:
    """List the files to read, sorted by name so that every run sees them in the same order."""
    directory = Path(path if path is not None else sysconfig.get_path("stdlib"))
    files = sorted(file for file in directory.glob(pattern) if file.is_file())
    if path is None:
        files = [file for file in files if not file.name.startswith(_SKIPPED_PREFIXES)]
    if not files:
        whose = "the standard library's directory" if path is None else "data.path"
        raise HooklineError(
            f"no file matches {pattern!r} in {directory} ({whose}); "
            "set data.path=DIR to a directory of text files, and data.pattern if they are not *.py"
        )
    return files


def _read_texts(files: list[Path], max_bytes: int) -> list[str]:
    """Read files until `max_bytes` are used up; the last one may be cut short."""
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
    train = [text for text, held in zip(texts, held_out, strict=True) if not held]
    validation = [text for text, held in zip(texts, held_out, strict=True) if held]
    return "\n".join(train), "\n".join(validation)


def _check_enough(train: Windows, validation: Windows, batch_size: int) -> None:
    """Refuse text too short to train on here, rather than with an epoch of no batches later."""
    if len(train) < batch_size or len(validation) < 1:
        raise HooklineError(
            f"too little text: {len(train)} training and {len(validation)} validation windows of "
            f"{train.context} characters, but {batch_size} (one batch) and 1 are the least; "
            "use a smaller context or batch_size, a larger max_bytes, or more files (data.path, data.pattern)"
        )


def _evenly_spread(available: int, wanted: int) -> list[int]:
    """Pick `wanted` indices (or all there are) at even distances, so that every held-out file is heard."""
    count = min(available, wanted)
    return [i * available // count for i in range(count)]


def _shuffled(windows: Windows, batch_size: int, seed: int) -> DataLoader[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(windows, batch_size, shuffle=True, drop_last=True, generator=generator)


def _in_order(windows: Dataset[Batch], batch_size: int) -> DataLoader[Batch]:
    # A loader draws a seed at every pass, even without shuffling; its own generator spares the global one.
    return DataLoader(windows, batch_size, generator=torch.Generator())
