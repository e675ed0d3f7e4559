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
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._guards import TracingContext

from hookline.activations.adding_up import FIRST, LATER, REFUSED
from hookline.activations.compiled import STATISTICS
from hookline.activations.operators import give_back, take_token
from hookline.activations.site import NO_TOKEN, Site
from hookline.events.dispatch import Fire
from hookline.stats.flush import Arrival, Flush
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
        self._counts = Flush()
        self._counted: dict[Counted, Tensor] = {}  # what has arrived, until somebody asks
        self._graph: weakref.ref[TracingContext] | None = None  # the one that asked last
        self._edition = next(_editions)
        self._lock = threading.RLock()

    def signed(self, wish: str) -> str:
        """What a module's hooks want, such that no graph serves it that was made for another ledger."""
        return f"{wish} {self._edition}" if wish == STATISTICS else wish

    def serve(self, sites: Sequence[Site]) -> None:
        """Add up for these modules, and no others."""
        with self._lock:
            if tuple(sites) == self._sites:
                return
            self._take()
            self._sites = tuple(sites)
            for site in sites:
                site.ledger = self
            self._make_tallies()

    def close(self) -> None:
        """Let go of the device's memory, and of what was not handed over."""
        with self._lock:
            if self.token is not NO_TOKEN:
                give_back(self.token)
            self.token = self.due = NO_TOKEN
            self._sites, self._page, self._says = (), None, 0
            self._edition = next(_editions)

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

    def _open_on(self, device: torch.device) -> None:
        from hookline.stats.tally import make_flag  # only now: it imports Triton
        from hookline.stats.tally_order import keep_what_is_saved

        keep_what_is_saved()
        with self._lock:
            self.token, self.due = take_token(self), make_flag(device)
            self._make_tallies()

    def _make_tallies(self) -> None:
        """For all modules at once: blocks that share a graph must look alike to it."""
        if self.due is NO_TOKEN:
            return
        from hookline.stats.tally import make_tally

        for site in self._sites:
            if site.tally is NO_TOKEN:
                site.tally = make_tally(self.due.device)

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
            self._add_up(self._counts.drain())
            for counted, counts in self._counted.items():
                _tell(counted, counts)
            self._counted.clear()

    def _take(self) -> None:
        with self._lock:
            page, self._page = self._page or Page(0, ()), None
            if self.due is NO_TOKEN or not self._sites:
                return
            from hookline.stats.tally import take

            rows, counts = take([site.tally for site in self._sites])
            for one in page.due:
                one.taker.take(*self._rows_of(one, rows), page.step)
            self._counts.send(page.step, Counted(self._sites, page.due), counts)
            self._add_up(self._counts.ready())

    def _rows_of(self, one: Due, rows: Tensor) -> tuple[list[str], Tensor]:
        """Those of a hook's own modules, with their names."""
        places = [place for place, site in enumerate(self._sites) if site in one.sites]
        names = [self._sites[place].name for place in places]
        return names, rows if len(places) == len(rows) else rows[kept_table(rows.device, tuple(places))]

    def _add_up(self, arrivals: Iterator[Arrival]) -> None:
        for arrival in arrivals:
            counted: Any = arrival.keys
            known = self._counted.get(counted)
            self._counted[counted] = arrival.rows if known is None else known + arrival.rows


def _tell(counted: Counted, counts: Tensor) -> None:
    """Note at modules how often they were called, and hooks with them."""
    for site, (calls, heard) in zip(counted.sites, counts.tolist(), strict=True):
        site.calls += int(calls)
        for one in counted.due:
            if site in one.sites:
                site.fired[one.hook] = site.fired.get(one.hook, 0) + int(heard)
