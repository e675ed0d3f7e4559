"""`hookline verify` prints a table and says by its exit status whether a hook changes training undeclared."""

from pathlib import Path

import pytest

from hookline.cli import main


@pytest.fixture
def own_hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's package with a harmless hook and a harmful one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_verified_hooks.py").write_text(
        "import logging\n"
        "import torch\n"
        "from hookline import TrainingHook, register_data, register_hook, register_model\n"
        "class Good(TrainingHook):\n"
        "    def on_step_end(self, ctx): print('SAID', ctx.loss)\n"
        "class Bad(TrainingHook):\n"
        "    def on_train_batch_start(self, step, batch):\n"
        "        if step == 2: batch[0].add_(1)\n"
        "class Failing(TrainingHook):\n"
        "    def setup(self, trainer=None): logging.getLogger('hookline').warning('it is %s here', 'cold')\n"
        "    def on_step_end(self, ctx): raise ValueError('oh no')\n"
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
    assert "OK: no hook changed training without declaring it." in printed
    assert not (own_hooks / "runs").exists()


def test_a_hook_that_writes_gives_status_1(own_hooks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And is named with the step and what it wrote to."""
    allow = ["--allow", "my_verified_hooks", "--allow", "torch"]
    assert main(["verify", config(own_hooks, "Good", "Bad"), "--steps", "3", *allow]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "changes training from step 2 on, through the batch" in printed
    assert "Undeclared changes by bad." in printed


def test_a_wrong_config_is_all_that_is_said(own_hooks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A config that no trainer can be made of is refused before anything is printed."""
    allow = ["--allow", "my_verified_hooks", "--allow", "torch"]
    assert main(["verify", config(own_hooks, "Good"), "model.in_featurs=3", *allow]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("hookline: error: model.in_featurs: ") and printed.err.count("\n") == 1


def test_warnings_stand_below_the_table(own_hooks: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What hooks warn of does not come between the lines, and what a verdict says is not said again."""
    allow = ["--allow", "my_verified_hooks", "--allow", "torch"]
    assert main(["verify", config(own_hooks, "Failing", "Good"), "--steps", "4", *allow]) == 0
    printed = capfd.readouterr()
    assert printed.err == ""
    above, _, below = printed.out.partition("OK: no hook changed training without declaring it.\n")
    assert "failed: ValueError: oh no" in above and "it is cold" not in above
    assert below == "warning: it is cold here\n"


def test_a_run_that_fails_does_not_hide_its_warnings(own_hooks: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What was warned of before a hook ended the run is printed, then the error."""
    allow = ["--allow", "my_verified_hooks", "--allow", "torch"]
    path = config(own_hooks, "Failing")
    assert main(["verify", path, "trainer.debug=true", "--steps", "4", *allow]) == 2
    printed = capfd.readouterr()
    assert printed.out.endswith("warning: it is cold here\n")
    who = "raised by hook 'failing' in on_step_end, step 1"
    assert printed.err == f"hookline: error: ValueError: oh no; {who} (--debug shows the traceback)\n"


def test_hooks_that_save_have_a_place_for_it(own_hooks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is gone afterwards; and no steps at all would vouch for everything."""
    allow = ["--allow", "my_verified_hooks", "--allow", "torch"]
    written = Path(config(own_hooks, "Good"))
    written.write_text(written.read_text() + "    - {name: checkpoint, save_every_n_steps: 2}\n")
    assert main(["verify", str(written), "--steps", "5", *allow]) == 0
    assert "checkpoint" in capsys.readouterr().out and not (own_hooks / "runs").exists()
    with pytest.raises(SystemExit):
        main(["verify", str(written), "--steps", "0"])
    assert "argument --steps: expected an integer of at least 1, got '0'" in capsys.readouterr().err
