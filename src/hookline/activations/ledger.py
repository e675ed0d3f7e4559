"""The ledger of a tap: statistics of modules in compiled code, added up there and handed over when it has run.

Where hooks want nothing of a module but statistics of its output, and the output is on a GPU, the graph gets a kernel
instead of a call back into Python. Once a run, before its first such kernel, the graph asks the ledger who is due; the
answer is a number on the device that every kernel reads, so one graph serves all schedules. The rows of all modules
are taken together when the step is over, when somebody reads, or when another step begins.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch._guards import TracingContext

from hookline.activations.adding_up import FIRST, LATER, REFUSED, close_book, open_book
from hookline.activations.compiled import STATISTICS
from hookline.activations.looks import edition_of, look_at_edition
from hookline.activations.operators import give_back, take_token
from hookline.activations.site import NO_TOKEN, Site
from hookline.events.dispatch import Fire
from hookline.stats.layout import kept_table
from hookline.stats.statistics import has_kernels

_editions = itertools.count()


class Taker(Protocol):
    """A hook that wants statistics and nothing else: compiled code adds them up for it."""

    def listens(self) -> bool:
        """Whether it wants what runs now."""

    def take(self, names: Sequence[str], rows: Tensor, step: int) -> None:
        """Get rows on the device, of a step's calls; the count of a module that was not called is NaN."""


class Due(NamedTuple):
    """A hook that is due, with its modules."""

    hook: str
    taker: Taker
    sites: frozenset[Site]


class Page(NamedTuple):
    """For which step, and for whom, the tallies are being added to."""

    step: int
    due: tuple[Due, ...]


class Counted(NamedTuple):
    """Which modules' calls are counted, and who heard them."""

    sites: tuple[Site, ...]
    due: tuple[Due, ...]


class Rows(NamedTuple):
    """Which rows belong to a hook."""

    names: list[str]
    places: tuple[int, ...]

    def of(self, rows: Tensor) -> Tensor:
        """Those rows."""
        return rows if len(self.places) == len(rows) else rows[kept_table(rows.device, self.places)]


class Ledger:
    """Keeps a tally for every module whose statistics compiled code adds up; all are on the device that comes first.

    One thread runs the model at a time: two that are told different things share the answer to both.
    """

    def __init__(self, fire: Fire) -> None:
        self.token = NO_TOKEN  # stands for the ledger in graphs
        self.due = NO_TOKEN  # on the device: 1 if somebody is due, else 0
        self._fire = fire
        self._sites: tuple[Site, ...] = ()
        self._page: Page | None = None
        self._says = 0  # what `due` holds
        self._addresses = NO_TOKEN  # of the tallies, on the device
        self._counts: dict[tuple[Due, ...], Tensor] = {}  # how often these modules were called, on the device
        self._counted: list[tuple[Counted, Tensor]] = []  # the same, until somebody asks, with those of other modules
        self._parts: dict[Due, Rows] = {}  # of hooks that were due
        self._model: weakref.ref[torch.nn.Module] | None = None
        self._graph: weakref.ref[TracingContext] | None = None  # the one that asked last
        self._title = f"{STATISTICS} {next(_editions)}"
        self._lock = threading.RLock()

    def signed(self, wish: str) -> str:
        """What a module's hooks want, such that graphs ask this ledger and no other."""
        if wish != STATISTICS:
            return wish
        open_book(self._title, self)
        return self._title

    def serve(self, sites: Sequence[Site], model: torch.nn.Module | None = None) -> None:
        """Add up for these modules, those of a model among them, and no others."""
        with self._lock:
            self._model = None if model is None else weakref.ref(model)
            if tuple(sites) == self._sites:
                return
            self._take()
            self._see(tuple(sites))
            self._make_tallies()

    def close(self) -> None:
        """Let go of the device's memory, and of what was not handed over."""
        with self._lock:
            if self.token is not NO_TOKEN:
                give_back(self.token)
            self.token = self.due = NO_TOKEN
            self._page, self._says = None, 0
            self._see(())
            close_book(self._title)
            self._title = f"{STATISTICS} {next(_editions)}"

    def _see(self, sites: tuple[Site, ...]) -> None:
        """These and no others are added up for; what was worked out for others goes."""
        self._sites, self._addresses, self._counts, self._parts = sites, NO_TOKEN, {}, {}

    # ---- while a graph is traced ---------------------------------------------------------------------------------

    def admit(self, device: torch.device) -> str:
        """Whether a graph may add up outputs on this device, and whether it asks for the first time."""
        if self.due is NO_TOKEN and has_kernels(device):
            self._open_on(device)
        if self.due is NO_TOKEN or self.due.device != device:
            return REFUSED
        graph = TracingContext.try_get()
        if graph is None or (self._graph is not None and self._graph() is graph):
            return LATER
        self._graph = weakref.ref(graph)
        return FIRST

    def is_of_whole_model(self) -> bool:
        """Whether the graph that is being traced begins with the model's own code, and not with that of a block."""
        model, graph = self._model() if self._model is not None else None, TracingContext.try_get()
        code = getattr(model.forward, "__code__", None) if model is not None else None
        return code is not None and getattr(graph, "traced_code", [])[:1] == [code]

    def edition(self) -> str:
        """Which torch hooks of ours the model has."""
        return edition_of(self._model() if self._model is not None else None)

    def look_at_edition(self) -> bool:
        """Have the graph that is being traced look at it instead of hook dictionaries, if it is of the whole model."""
        model = self._model() if self._model is not None else None
        return model is not None and self.is_of_whole_model() and look_at_edition(model)

    def _open_on(self, device: torch.device) -> None:
        from hookline.activations.together import add_together  # only now: it imports inductor
        from hookline.stats.cuda_tally import make_flag  # and this Triton

        add_together()
        with self._lock:
            self.token, self.due = take_token(self), make_flag(device)
            self._make_tallies()

    def _make_tallies(self) -> None:
        """For all modules at once: blocks that share a graph must look alike to it."""
        sites = [site for site in self._sites if site.tally is NO_TOKEN]
        if self.due is NO_TOKEN or not sites:
            return
        from hookline.stats.cuda_tally import make_tallies

        table, rows = make_tallies(len(sites), self.due.device)
        for number, (site, row) in enumerate(zip(sites, rows, strict=True)):
            site.tally, site.home = row, (table, number)

    # ---- when a graph runs ---------------------------------------------------------------------------------------

    def begin(self, due: Tensor) -> None:
        """A graph begins to run: tell its kernels whether somebody is due, and what came before from what comes."""
        heard = self._fire.on_forward
        page: Page | None = None if heard is None else heard(self, None, None, None, None, None)
        with self._lock:
            if self._page is not None and page is not None and (page != self._page or not page.step):
                self.hand_over()
            self._page = page or self._page
            if self._says != bool(page):
                self._says = int(bool(page))
                due.fill_(self._says)

    def hand_over(self) -> None:
        """Give what has been added up to those it was added up for; nothing waits for the device."""
        if self._page is not None:
            self._take()

    def settle(self) -> None:
        """Wait until every call that has been made is counted."""
        with self._lock:
            self._take()
            for counted, counts in self._counted:
                _tell(counted, counts)
            self._counted, self._counts = [], {}

    def _take(self) -> None:
        with self._lock:
            page, self._page = self._page or Page(0, ()), None
            if self.due is NO_TOKEN or not self._sites:
                return
            from hookline.stats.cuda_tally import addresses_of, take

            if self._addresses is NO_TOKEN:
                self._addresses = addresses_of([site.tally for site in self._sites])
            rows = take(self._addresses, self._counts_for(page.due))
            for one in page.due:
                part = self._part_of(one)
                one.taker.take(part.names, part.of(rows), page.step)

    def _counts_for(self, due: tuple[Due, ...]) -> Tensor:
        """Where the calls are counted that these heard. The numbers stay on the device until somebody wants them."""
        if due not in self._counts:
            from hookline.stats.cuda_tally import make_counts

            counts = self._counts[due] = make_counts(len(self._sites), self.due.device)
            self._counted.append((Counted(self._sites, due), counts))
        return self._counts[due]

    def _part_of(self, one: Due) -> Rows:
        """Which rows are those of a hook's own modules."""
        if one not in self._parts:
            places = tuple(place for place, site in enumerate(self._sites) if site in one.sites)
            self._parts[one] = Rows([self._sites[place].name_for(one.hook) for place in places], places)
        return self._parts[one]


def _tell(counted: Counted, counts: Tensor) -> None:
    """Note at modules how often they were called, and hooks with them."""
    for site, (calls, heard) in zip(counted.sites, counts.tolist(), strict=True):
        site.calls += int(calls)
        for one in counted.due:
            if site in one.sites:
                site.fired[one.hook] = site.fired.get(one.hook, 0) + int(heard)
