"""Runs with trackers: small trainers, and readers of what W&B's offline files contain."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import builders

from hookline import SimpleTrainer

OFFLINE = {
    "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true",
    "WANDB__SERVICE_WAIT": "600",  # a busy machine may need more than 30 s to start wandb's process
}  # fmt: skip
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108020000009077"
    "53de0000000c4944415408d763f8cfc000000301010018dd8db00000000049454e44ae426082"
)  # one red pixel


def make_trainer(*hooks: Any, **options: Any) -> SimpleTrainer:
    """Make a trainer of eight steps with a validation at the end of each of two epochs."""
    batches = builders.make_batches(4, size=2)
    options = {"record": True, "max_epochs": 2, "val_dataloader": batches[:1], **options}
    return builders.make_trainer(data=batches, hooks=list(hooks), **options)


def media_rows() -> list[Any]:
    """Return an image and a table as a record has them."""
    table = SimpleNamespace(columns=("text", "score"), rows=(("a|b", 0.5), ("c", None)), kind=None)
    image = SimpleNamespace(png=PNG, width=1, height=1)
    rows = {"sample/pixel": image, "sample/table": table}
    return [SimpleNamespace(step=3, epoch=0, time=5.0, name=name, content=content) for name, content in rows.items()]


def send_media(tracker: Any) -> None:
    """Put an image and a table into the queue of a tracker, as its record does."""
    tracker._put(tracker._tracked[1], "media", media_rows())


def offline_files(run_dir: Path) -> list[Path]:
    """Return what wandb wrote offline, one file per attempt, the oldest first."""
    # Their folders are named after the time; a process that was killed may leave one that is still written to.
    return sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.parent.name)


def read_offline(path: Path) -> list[Any]:
    """Return the messages of an offline file, as wandb's own protocol has them: LevelDB's log format.

    A file is a header of 7 bytes and blocks of 32 kB. A record has a checksum, a length and a type, which says whether
    it is whole or the first, a middle or the last part of a message.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, message, messages = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            messages.append(Record.FromString(message))
            message = b""
    return messages


def history_of(records: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run's history."""
    for record in records:
        if record.WhichOneof("record_type") == "history":
            row: dict[str, Any] = {}
            for item in record.history.item:
                *above, key = [item.key] if item.key else item.nested_key
                inner = row
                for part in above:
                    inner = inner.setdefault(part, {})
                inner[key] = json.loads(item.value_json)
            yield row
