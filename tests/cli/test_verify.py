"""`hookline verify` prints a table and says by its exit status whether a hook changes training undeclared."""

from pathlib import Path

import pytest

from hookline.cli import main


@pytest.fixture
def own_hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of one's own with a good hook and a bad one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_verified_hooks.py").write_text(
        "import torch\n"
        "from hookline import TrainingHook, register_data, register_hook, register_model\n"
        "class Good(TrainingHook):\n"
        "    def on_step_end(self, ctx): print('SAID', ctx.loss)\n"
        "class Bad(TrainingHook):\n"
        "    def on_train_batch_start(self, step, batch):\n"
        "        if step == 2: batch[0].add_(1)\n"
        "class Data:\n"
        "    def __init__(self): self.train = [(torch.ones(2, 3) * i, torch.ones(2, 1)) for i in range(8)]\n"
    )
    return tmp_path


def config(tmp_path: Path, *hooks: str) -> str:
    listed = "".join(f"    - {{name: my_verified_hooks.{hook}}}\n" for hook in hooks)
    (tmp_path / "run.yaml").write_text(
        "data: {name: my_verified_hooks.Data}\n"
        "model: {name: torch.nn.Linear, in_features: 3, out_features: 1}\n"
        "optimizer: {name: torch.optim.SGD, lr: 0.01}\n"
        "loss: {name: torch.nn.MSELoss}\n"
        f"hooks:\n  lifecycle:\n{listed}"
    )
    return str(tmp_path / "run.yaml")


def test_harmless_hooks_give_status_0(own_hooks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The hooks' own output is not mixed into the table."""
    allow = ["--allow", "my_verified_hooks", "--allow", "torch"]
    assert main(["verify", config(own_hooks, "Good"), "--steps", "3", *allow]) == 0
    printed = capsys.readouterr().out
    assert "good" in printed and "changes nothing" in printed and "SAID" not in printed
    assert "No hook changes training that does not say so." in printed
    assert not (own_hooks / "runs").exists()


def test_a_hook_that_writes_gives_status_1(own_hooks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And is named with the step and what it wrote to."""
    allow = ["--allow", "my_verified_hooks", "--allow", "torch"]
    assert main(["verify", config(own_hooks, "Good", "Bad"), "--steps", "3", *allow]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "changes training from step 2 on, through the batch" in printed
    assert "Undeclared changes by bad." in printed
