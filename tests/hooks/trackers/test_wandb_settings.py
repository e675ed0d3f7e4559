"""Where wandb sends the API key is the user's choice, not that of a file in the current folder."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tracked_runs import OFFLINE

WANDB_RUN = """
import sys, torch
from hookline import WandbTracker, get_trainer
model = torch.nn.Linear(4, 1)
batches = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(4)]
get_trainer(
    "simple", model, batches, torch.optim.SGD(model.parameters(), lr=0.1), "cpu", max_epochs=1, console=False,
    loss_fn=torch.nn.functional.mse_loss, output_dir="runs", hooks=[WandbTracker(mode="online", timeout=1.0)],
).train()
print("trained", flush=True)
"""


def wandb_environment(home: Path, **more: str) -> dict[str, str]:
    """Return an environment in which wandb is online and knows nothing but a key."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    offline = {name: value for name, value in OFFLINE.items() if name not in ("WANDB_MODE", "WANDB_SILENT")}
    return {**kept, **offline, "HOME": str(home), "WANDB_API_KEY": "a" * 40, **more}


@pytest.fixture
def stranger() -> Iterator[tuple[str, list[str]]]:
    """A server that must not be asked anything, and the credentials that it gets."""
    got: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(str(self.headers.get("Authorization")))
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *args: Any) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}", got
        http.shutdown()


def test_a_file_of_the_current_folder_cannot_choose_wandbs_server(
    tmp_path: Path, stranger: tuple[str, list[str]]
) -> None:
    """The API key goes to the server of the user's own settings; the folder's are named in a warning."""
    url, got = stranger
    mine, here = tmp_path / "home" / ".config" / "wandb", tmp_path / "here" / "wandb"
    for folder, server in ((mine, "http://127.0.0.1:9"), (here, url)):
        folder.mkdir(parents=True)
        (folder / "settings").write_text(f"[default]\nbase_url = {server}\n")
    environment = wandb_environment(tmp_path / "home")
    script = [sys.executable, "-c", WANDB_RUN]
    done = subprocess.run(
        script, cwd=here.parent, env=environment, capture_output=True, text=True, timeout=600, check=True
    )
    assert got == [] and f"ignores base_url of {here / 'settings'}; set them in" in done.stderr
