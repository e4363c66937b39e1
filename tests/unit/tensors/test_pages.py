"""Pages for new memory: large ones as long as they are fast, and nothing in them is changed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from torchferry.tensors import pages
from torchferry.tensors.pages import HUGE_PAGE_BYTES, HugePages

FAST_S, SLOWLY_S = 0.0003, 0.009


class Asked:
    """Stands for the system's madvise: notes which pages were asked for, and takes its time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Iterator[float]) -> None:
        self.pages: list[int] = []
        self._seconds = seconds
        self.now_s = 0.0
        monkeypatch.setattr(pages, "_madvise", self._advise)

    def _advise(self, address: int, nbytes: int, advice: int) -> int:
        assert nbytes == HUGE_PAGE_BYTES
        if advice == pages._MADV_POPULATE_WRITE:
            self.pages.append(address // HUGE_PAGE_BYTES)
            self.now_s += next(self._seconds)
        return 0

    def clock(self) -> float:
        return self.now_s


def page(number: float) -> int:
    return int(number * HUGE_PAGE_BYTES)


def test_every_page_is_asked_for_once_however_the_memory_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, iter([FAST_S] * 100))
    huge = HugePages(asked.clock)
    # Memory that begins and ends within pages, which are not its alone.
    for start, end in [(1.5, 3.25), (3.25, 6.0), (6.0, 8.75)]:
        huge.fault_in(page(start), page(end), page(8.75))
    assert asked.pages == [2, 3, 4, 5, 6, 7]


def test_no_more_are_asked_for_once_they_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, iter([FAST_S, SLOWLY_S, FAST_S, SLOWLY_S, SLOWLY_S, FAST_S]))
    huge = HugePages(asked.clock)
    huge.fault_in(page(0), page(50), page(50))
    assert asked.pages == [0, 1, 2, 3, 4]
    huge.fault_in(page(60), page(70), page(70))
    assert len(asked.pages) == 5
    assert not huge.wanted


def test_an_old_kernel_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[int] = []

    def refuses_to_populate(address: int, nbytes: int, advice: int) -> int:
        advised.append(advice)
        return -1 if advice == pages._MADV_POPULATE_WRITE else 0

    monkeypatch.setattr(pages, "_madvise", refuses_to_populate)
    HugePages(lambda: 0.0).fault_in(page(0), page(50), page(50))
    assert advised == [pages._MADV_HUGEPAGE, pages._MADV_POPULATE_WRITE]


def test_none_are_asked_for_where_nobody_knows_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_madvise", None)
    HugePages(lambda: 0.0).fault_in(page(0), page(50), page(50))


def test_what_lies_in_them_is_not_changed() -> None:
    memory = torch.arange(3 * HUGE_PAGE_BYTES // 8)
    before, first = memory.clone(), memory.data_ptr()
    HugePages(lambda: 0.0).fault_in(first, first + memory.nbytes, first + memory.nbytes)
    assert torch.equal(memory, before)
