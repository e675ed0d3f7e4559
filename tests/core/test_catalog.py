"""The catalog is the only list of events, and every row of it is whole."""

import inspect

import pytest

from hookline import HookRegistry
from hookline.core.catalog import ARGUMENT_ALIASES, ARGUMENTS, CATALOG, SPELLINGS, Events
from hookline.errors import RegistrationError


def test_every_row_is_a_method_of_events_and_every_method_a_row() -> None:
    """No event lives outside the class, and no method of it is something else."""
    methods = {name for name, value in vars(Events).items() if name.startswith("on_") and callable(value)}
    assert methods == set(SPELLINGS)
    assert set(CATALOG) <= methods


def test_every_row_says_what_it_promises() -> None:
    """A row without a sentence, a frequency or a word on the gradients would leave the docs page empty."""
    for row in CATALOG.values():
        assert row.doc and row.fires and row.gradients, row.name
        assert row.kind in ("lifecycle", "forward", "update")


def test_every_argument_of_every_row_is_explained() -> None:
    """Whatever a hook may name has a meaning and a cost in the table of arguments."""
    for row in CATALOG.values():
        for name in row.argument_names:
            assert ARGUMENTS[ARGUMENT_ALIASES.get(name, name)].meaning
        assert set(row.order) <= set(row.attributes), f"{row.name}: its positional order names what it does not have"


def test_no_spelling_belongs_to_two_events() -> None:
    """A spelling leads to one row; otherwise a hook would listen to an event it did not mean."""
    spelled = [spelling for row in CATALOG.values() for spelling in (row.name, *row.aliases)]
    assert len(spelled) == len(set(spelled)) == len(SPELLINGS)


@pytest.mark.parametrize(
    ("canonical", "aliases"),
    [
        ("on_train_start", {"on_train_begin"}),
        ("on_epoch_start", {"on_epoch_begin"}),
        ("on_train_batch_start", {"on_batch_start", "on_batch_begin"}),
        ("on_train_batch_end", {"on_batch_end"}),
        ("on_before_optimizer_step", {"on_pre_optimizer_step"}),
        ("on_validation_start", {"on_eval_start", "on_eval_begin"}),
        ("on_validation_end", {"on_eval_end"}),
        ("on_train_end", {"on_training_end"}),
        ("on_step_end", set()),
    ],
)
def test_aliases_are_the_designed_ones(canonical: str, aliases: set[str]) -> None:
    """The second spellings of an event are those of the design, no more and no fewer."""
    assert set(CATALOG[canonical].aliases) == aliases


def test_closing_events_are_the_last_two() -> None:
    """Only on_exception and on_train_end reach every hook whatever happens."""
    assert [row.name for row in CATALOG.values() if row.closing] == ["on_exception", "on_train_end"]


def test_inner_events_are_those_of_batch_step_forward_and_update() -> None:
    """Schedules gate the repeating events; run, epoch, validation, checkpoint and exception events always arrive."""
    outer = {row.name for row in CATALOG.values() if not row.inner}
    assert outer == {
        "on_train_start", "on_epoch_start", "on_validation_start", "on_validation_batch_start",
        "on_validation_batch_end", "on_validation_end", "on_epoch_end", "on_checkpoint_save", "on_checkpoint_load",
        "on_exception", "on_train_end",
    }  # fmt: skip


def test_an_event_may_be_spelled_in_any_way_with_or_without_its_prefix(registry: HookRegistry) -> None:
    """`train_batch_end`, `on_batch_end` and the canonical name mean one row."""
    explained = {registry.explain(spelling) for spelling in ("train_batch_end", "on_batch_end", "batch_end")}
    assert explained == {registry.explain("on_train_batch_end")}


def test_a_misspelt_event_names_the_nearest() -> None:
    """A miss says what was probably meant."""
    expected = r"'on_train_bach_end' is not an event; did you mean 'on_train_batch_end'"
    with pytest.raises(RegistrationError, match=expected):
        HookRegistry().explain("on_train_bach_end")


def test_the_spelling_decides_which_metrics_a_validation_hook_gets() -> None:
    """on_eval_end reads the eval/ keys, on_validation_end the val/ keys."""
    row = CATALOG["on_validation_end"]
    assert row.attribute("metrics", "on_eval_end") == "eval_metrics"
    assert row.attribute("metrics", "on_validation_end") == "val_metrics"


def test_argument_aliases_lead_to_the_same_value() -> None:
    """loader_idx and loader_name are other words for dataloader_idx and dataloader_name."""
    row = CATALOG["on_train_batch_end"]
    assert row.attribute("loader_idx", row.name) == row.attribute("dataloader_idx", row.name) == "dataloader_idx"
    assert row.attribute("loader_name", row.name) == "dataloader_name"
    assert row.attribute("lodaer", row.name) is None


def test_the_loss_before_backward_is_the_live_tensor_and_free() -> None:
    """Only in on_before_backward does loss cost no host read, because it is not a float there."""
    assert CATALOG["on_before_backward"].attribute("loss", "on_before_backward") == "live_loss"
    assert CATALOG["on_before_backward"].free("loss")
    assert not CATALOG["on_train_batch_end"].free("loss")
    assert CATALOG["on_step_end"].attribute("loss", "on_step_end") == "window_loss"


def test_the_state_of_an_update_hook_is_its_own_and_free() -> None:
    """At on_update `state` is not the run's dict, which waits for the device."""
    assert CATALOG["on_update"].free("state")
    assert not CATALOG["on_step_end"].free("state")


def test_overriding_an_event_with_any_signature_is_legal_typing() -> None:
    """Each row takes *args and **kwargs, so that type checkers accept overrides with fewer names."""
    for name in SPELLINGS:
        kinds = [parameter.kind for parameter in inspect.signature(getattr(Events, name)).parameters.values()]
        assert kinds[1:] == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD], name


def test_the_slots_are_the_catalog() -> None:
    """One slot per event, empty at first, and no other attribute can be put there by a slip."""
    slots = HookRegistry().slots
    assert [getattr(slots, name) for name in CATALOG] == [None] * len(CATALOG)
    with pytest.raises(AttributeError):
        slots.on_batch_ennd = None
