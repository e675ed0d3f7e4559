"""How many processes a run has is asked in a few places only; everything else does the same for any number of them."""

import ast
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "hookline"

ACT_TOGETHER = {
    "ranks": "answers it",
    "trainer/trainer": "chooses the agreement, which does everything else that depends on it",
    "core/entry": "a hook that all ranks call together cannot fail or be left out on one of them",
    "activations/monitor": "rows of one process are recorded as they arrive, those of ranks after an exchange",
}
"""Which files may ask `act_together`, and why."""

WORLD_SIZE = {
    "ranks": "answers it",
    # ---- what differs with the number of ranks
    "build": "a model is sharded before its optimizer is made",
    "checkpoints/saves": "a rank may have failed, and a checkpoint needs all of them",
    "core/collectives": "a hook may not call a collective that others do not know of",
    "core/failures": "a note names the rank; an update that fails on one rank ends the run",
    "core/registry": "arguments of an event may be collectives; failures may switch a hook off on one rank",
    "hosts/foreign": "each process counts tokens and seconds for itself, so hooks that do so cannot act alike",
    "hosts/watch": "with several ranks a signal ends a process also while it waits for the others",
    "hooks/checkpoint": "nothing is saved after a failure of one rank",
    "hooks/throughput": "a share of the peak of all devices",
    "run/view": "how many ranks have batches of their own",
    "trainer/accelerate": "the launcher may have started processes without a process group",
    "trainer/checkpointing": "the ranks write one checkpoint together, and not after a failure",
    "trainer/data/epoch_batches": "a sampler gives each rank its share",
    "trainer/data/loader_state": "a sampler gives each rank its share",
    "trainer/data/sampler": "gives each rank its share",
    "trainer/epochs": "a position in the data counts the batches of all ranks",
    "trainer/parallel": "chooses the engine and the mesh",
    "trainer/sections": "a checkpoint of more or fewer ranks is shared out again",
    "trainer/stragglers": "means over the ranks",
    "trainer/validation": "a sharded model needs a batch from every rank",
    "trainer/window": "the weight of a window is a mean over the ranks",
    "core/registration": "a hook's attribute `ranks` that none of the ranks has means something else",
    "testing/ranks": "threads that stand for ranks",
    # ---- what is said about it
    "cli/train": "the command that continues the run",
    "hooks/console/hook": "the line says that a loss is rank 0's",
    "hooks/console/view": "the line says that a loss is rank 0's",
    "hooks/nan_forensics/dump": "the folder has the rank in its name",
    "hooks/nan_forensics/hook": "the summary names the rank",
    "run/run": "the reason of a failure names the rank",
    "trainer/data/rank_checks": "errors say how many ranks there are",
    "trainer/training": "the opening line; only one process may leave a step unfinished",
}
"""Which files may read `world_size`, and why."""


def files_that_read(attribute: str) -> set[str]:
    """Return the source files that read an attribute of this name, without suffix."""
    asked = set()
    for path in SOURCE.rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if any(isinstance(node, ast.Attribute) and node.attr == attribute for node in nodes):
            asked.add(path.relative_to(SOURCE).with_suffix("").as_posix())
    return asked


def test_act_together_is_asked_in_four_files() -> None:
    """Other code calls the agreement or the ranks, which do nothing or act alone in one process."""
    assert files_that_read("act_together") | {"ranks"} == ACT_TOGETHER.keys()
    assert len(ACT_TOGETHER) <= 4


def test_the_number_of_ranks_is_asked_where_the_list_says() -> None:
    """A file that is new here says why it cannot do the same for any number of ranks; one that no longer asks goes."""
    assert files_that_read("world_size") == WORLD_SIZE.keys()
