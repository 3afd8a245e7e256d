"""A budget of a host is divided among its ranks, however they were started."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from ebbtide.errors import PolicyError
from ebbtide.stores.host_memory import num_host_ranks, parse_host_budget
from forked import LIMIT_S

GIB = 2**30
VARIABLES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "WORLD_SIZE")


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("text", ["96GiB/node", "96 GiB / NODE ", "98304MiB/node"])
def test_a_budget_of_a_host_is_divided(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert parse_host_budget(text) == 24 * GIB


def test_parts_are_never_more_than_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """10000 bytes for 3 ranks: 3333 each."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert parse_host_budget("10000B/node") == 3333


@pytest.mark.parametrize("budget", [24 * GIB, "24GiB"])
def test_a_budget_of_a_rank_is_its_own(budget: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert parse_host_budget(budget) == 24 * GIB


@pytest.mark.parametrize(
    "text",
    ["/node", "lots/node", "24GiB/host", "24GiB//node", "24GiB/node/2", "90%", "96B/node"],
)
def test_what_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(PolicyError):
        parse_host_budget(text, name="--host-budget")


def test_one_process_has_all_of_it() -> None:
    assert num_host_ranks() == 1
    assert parse_host_budget("24GiB/node") == 24 * GIB


@pytest.mark.parametrize("name", VARIABLES)
def test_the_launcher_says_how_many_ranks_there_are(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")  # of all hosts
    monkeypatch.setenv(name, "2")
    assert num_host_ranks() == 2


def test_a_wrong_number_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("0", "", "two"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
        assert num_host_ranks() == 1


def test_a_process_group_says_it_where_no_launcher_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `torch.multiprocessing.spawn`. What the group says comes before WORLD_SIZE."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setenv("WORLD_SIZE", "5")
    assert num_host_ranks() == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert num_host_ranks() == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
def test_a_process_that_may_have_siblings_is_refused() -> None:
    """It would take all of the budget, and so would each sibling."""

    def parse() -> None:
        signal.alarm(LIMIT_S)
        try:
            parse_host_budget("24GiB/node")
        except PolicyError as error:
            os._exit(7 if "call init_process_group before offload" in str(error) else 8)
        os._exit(9)

    child = multiprocessing.get_context("fork").Process(target=parse)
    child.start()
    child.join()
    assert child.exitcode == 7
