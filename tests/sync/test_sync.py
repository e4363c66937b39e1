"""sync on real ranks over gloo: who takes what from whom, and what every rank is told."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import torchferry
from tests.support.cluster import Cluster, RemoteError
from torchferry.engine.pull import published
from torchferry.engine.source import digest

TIMEOUT_S = 20


def state_of(value: float, step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((1000,), value), "b": torch.full((3,), -value)}, "step": step}


def catch_up(rank: int, versions: list[int | None], options: dict[str, Any]) -> dict[str, Any]:
    """Sync a state whose values are its version, and return what became of it."""
    version = versions[rank]
    state = state_of(float(version or 0), version or 0)
    weight = state["model"]["w"]
    result = torchferry.sync(state, version, **{"timeout": TIMEOUT_S, **options})
    return {
        "version": result.version,
        "role": result.role,
        "values": [*{*weight.tolist(), *(-state["model"]["b"]).tolist()}],
        "step": result.state["step"],
        "in place": result.state["model"]["w"] is weight,
        "failed": result.failed,
        "bytes": 0 if result.report is None else result.report.bytes_moved,
        "sources": 0 if result.report is None else len(result.report.sources),
    }


def errors_of(cluster: Cluster, fn: Any, *args: Any) -> list[BaseException]:
    """Run a function that raises on every rank, and return what each rank raised."""
    outcomes = cluster.start([(fn, args)] * cluster.world_size).outcomes()
    errors = [outcome.error for outcome in outcomes]
    assert all(isinstance(error, RemoteError) for error in errors), errors
    return [error.original for error in errors]  # type: ignore[union-attr]


class TestVersions:
    def test_ranks_behind_take_the_highest_version_in_place(self, quad: Cluster) -> None:
        answers = quad.run(catch_up, [3, 7, None, 7], {})
        assert [answer["role"] for answer in answers] == ["receiver", "source", "receiver", "source"]
        for answer in answers:
            assert (answer["version"], answer["values"], answer["step"]) == (7, [7.0], 7)
            assert answer["in place"]
            assert answer["failed"] == {}
        assert [answer["bytes"] for answer in answers] == [4012, 0, 4012, 0]
        # From both sources, and each receiver may take from the other one too.
        assert all(answer["sources"] >= 2 for answer in answers if answer["role"] == "receiver")

    def test_nobody_moves_anything_if_all_have_the_version(self, quad: Cluster) -> None:
        answers = quad.run(catch_up, [5, 5, 5, 5], {})
        assert [(answer["role"], answer["version"]) for answer in answers] == [("idle", 5)] * 4

    def test_many_calls_follow_each_other(self, quad: Cluster) -> None:
        assert quad.run(call_many_times, 12) == [[12.0] * 12] * 4

    def test_a_version_may_be_an_int_of_numpy(self, pair: Cluster) -> None:
        answers = pair.run(catch_up, [np.int64(4), np.int32(-1)], {"trust": np.int64(0)})
        assert [(answer["version"], answer["values"]) for answer in answers] == [(4, [4.0])] * 2

    def test_a_version_may_be_zero_or_negative(self, pair: Cluster) -> None:
        assert [answer["version"] for answer in pair.run(catch_up, [0, -1], {})] == [0, 0]

    def test_every_rank_raises_if_nobody_has_a_version(self, pair: Cluster) -> None:
        for error in errors_of(pair, catch_up, [None, None], {}):
            assert isinstance(error, torchferry.NoSuchVersion)
            assert isinstance(error, LookupError)
            assert "ranks 0, 1 passed version=None" in str(error)

    def test_atomic_receives_beside_the_state(self, pair: Cluster) -> None:
        assert pair.run(catch_up, [4, None], {"atomic": True})[1]["values"] == [4.0]

    def test_a_subgroup_has_ranks_of_its_own(self, quad: Cluster) -> None:
        assert quad.run(sync_in_a_subgroup) == ["not a member", "receiver 9.0", "not a member", "source 9.0"]


def call_many_times(rank: int, times: int) -> list[float]:
    found = []
    for call in range(times):
        state = state_of(float(times) if rank == call % 4 else 0.0, call)
        torchferry.sync(state, call if rank == call % 4 else None, timeout=TIMEOUT_S)
        found.append(state["model"]["w"][0].item())
    return found


def sync_in_a_subgroup(rank: int) -> str:
    group = dist.new_group([1, 3])
    state = state_of(9.0 if rank == 3 else 0.0, rank)
    if rank not in (1, 3):
        with pytest.raises(torchferry.BadArgument, match="this process is not in the group"):
            torchferry.sync(state, None, group=group)
        return "not a member"
    result = torchferry.sync(state, 9 if rank == 3 else None, group=group, timeout=TIMEOUT_S)
    return f"{result.role} {state['model']['w'][0]:.1f}"


class TestReplicas:
    def test_that_differ_are_found_although_nobody_is_behind(self, quad: Cluster) -> None:
        for error in errors_of(quad, sync_with_a_deviation, None, ()):
            assert isinstance(error, torchferry.ReplicasDiffer)
            assert error.differences == (torchferry.Difference("model.b", "", ((0, 1, 3), (2,))),)
            assert "model.b: differs between ranks 0, 1, 3 and rank 2" in str(error)
            assert "trust=RANK" in str(error)

    def test_take_the_values_of_the_trusted_rank(self, quad: Cluster) -> None:
        answers = quad.run(sync_with_a_deviation, 2, ())
        assert [answer["b"] for answer in answers] == [2.0] * 4
        assert [answer["role"] for answer in answers] == ["receiver", "receiver", "source", "receiver"]
        # Only what differs is taken.
        assert [answer["bytes"] for answer in answers] == [12, 12, 0, 12]

    def test_are_not_compared_at_paths_of_their_own(self, quad: Cluster) -> None:
        answers = quad.run(sync_with_a_deviation, None, "model.b")
        assert [answer["b"] for answer in answers] == [0.0, 0.0, 2.0, 0.0]
        assert [answer["role"] for answer in answers] == ["idle"] * 4

    def test_a_rank_behind_takes_such_paths_from_the_lowest_rank(self, quad: Cluster) -> None:
        assert quad.run(sync_positions) == [1, 1, 2, 3]

    def test_arguments_that_differ_are_an_error_everywhere(self, pair: Cluster) -> None:
        for error in errors_of(pair, trust_own_rank):
            assert isinstance(error, torchferry.BadArgument)
            assert "rank 0 sync(trust=0), rank 1 sync(trust=1)" in str(error)

    def test_a_trusted_rank_must_have_the_version(self, pair: Cluster) -> None:
        for error in errors_of(pair, catch_up, [4, 2], {"trust": 1}):
            assert isinstance(error, torchferry.BadArgument)
            assert "trust=1: rank 1 passed version=2, and the highest version is 4" in str(error)


def sync_with_a_deviation(rank: int, trust: int | None, per_rank: Any) -> dict[str, Any]:
    state = state_of(5.0, 5)
    state["model"]["b"].fill_(2.0 if rank == 2 else 0.0)
    result = torchferry.sync(state, 5, trust=trust, per_rank=per_rank, timeout=TIMEOUT_S)
    moved = 0 if result.report is None else result.report.bytes_moved
    return {"role": result.role, "b": state["model"]["b"][0].item(), "bytes": moved}


def sync_positions(rank: int) -> int:
    state = {"w": torch.ones(3), "loader": {"position": rank, "order": [torch.full((2,), rank)]}}
    result = torchferry.sync(state, None if rank == 0 else 3, per_rank=["loader"], timeout=TIMEOUT_S)
    assert result.state["loader"]["order"][0][0] == result.state["loader"]["position"]
    return result.state["loader"]["position"]  # type: ignore[no-any-return]


def trust_own_rank(rank: int) -> None:
    torchferry.sync(state_of(1.0, 1), 1, trust=rank, timeout=TIMEOUT_S)


def hashed_bytes(rank: int) -> tuple[int, int]:
    """Return how many bytes this rank hashes in a sync, and how many its state has."""
    hashed: list[int] = []

    def count(buffer: torch.Tensor) -> int:
        hashed.append(buffer.nbytes)
        return digest(buffer)

    state = {"w": torch.arange(900_001), "views": [*torch.zeros(2, 500_000)], "small": torch.ones(3)}
    with mock.patch.object(published, "digest", count):
        result = torchferry.sync(state, None if rank == 3 else 1, timeout=TIMEOUT_S)
    assert torch.equal(result.state["w"], torch.arange(900_001))
    return sum(hashed), 900_001 * 8 + 4_000_000 + 12


def test_a_source_hashes_its_state_once(quad: Cluster) -> None:
    for hashed, nbytes in quad.run(hashed_bytes)[:3]:
        # Small tensors are packed when they are served.
        assert nbytes <= hashed <= nbytes + 12


class TestFailures:
    def test_every_rank_names_a_rank_that_does_not_call(self, quad: Cluster) -> None:
        for absent in (0, 2):
            jobs = [None if rank == absent else (catch_up, ([1] * 4, {"timeout": 0.5})) for rank in range(4)]
            for outcome in quad.start(jobs).outcomes():
                if outcome.rank != absent:
                    assert isinstance(outcome.error, RemoteError)
                    error = outcome.error.original
                    assert isinstance(error, torchferry.LinkTimeout)
                    assert f"rank {absent} did not call sync in time" in str(error)

    def test_a_call_after_one_that_timed_out_succeeds(self, quad: Cluster) -> None:
        jobs = [None, *[(catch_up, ([1] * 4, {"timeout": 0.3}))] * 3]
        assert all(outcome.error for outcome in quad.start(jobs).outcomes()[1:])
        answers = quad.run(catch_up, [2, None, 1, 2], {})
        assert [answer["values"] for answer in answers] == [[2.0]] * 4

    def test_a_rank_that_calls_when_the_others_have_given_up_is_told_so(self, pair: Cluster) -> None:
        early = pair.start([(catch_up, ([1, 1], {"timeout": 0.3})), None]).outcomes()[0]
        late = pair.start([None, (catch_up, ([1, 1], {"timeout": 0.3}))]).outcomes()[1]
        assert "rank 1 did not call sync in time" in str(early.error)
        assert isinstance(late.error, RemoteError)
        assert isinstance(late.error.original, TimeoutError)
        assert "the call of rank 0 is over" in str(late.error)

    def test_a_receiver_that_does_not_fit_raises_and_the_others_name_it(self, quad: Cluster) -> None:
        answers = quad.run(sync_another_shape)
        for rank, answer in enumerate(answers):
            if rank == 2:
                assert "model.w: shape: incoming [1000], local [999]" in answer["error"]
                assert "model.b: dtype: incoming float32, local float16" in answer["error"]
                assert answer["unchanged"]
            else:
                assert [*answer["failed"]] == [2]
                assert "does not fit the local one" in answer["failed"][2]
                assert answer["value"] == 6.0

    def test_a_receiver_may_have_values_that_can_not_be_sent(self, quad: Cluster) -> None:
        answers = quad.run(sync_with_values_that_can_not_be_sent)
        for rank, answer in enumerate(answers):
            if rank == 2:
                assert "loader: kind: incoming ndarray int64[2], local a ndarray in read-only" in answer
            else:
                assert answer == {"extra": True, "loader": [1, 1], "failed": [2], "weight": 6.0}

    def test_a_source_that_can_not_be_sent_raises_and_the_others_go_on(self, quad: Cluster) -> None:
        answers = quad.run(sync_something_unsendable)
        assert answers[0] == "Unsendable: model.w.extra"
        assert [answer["weight"] for answer in answers[1:]] == [6.0] * 3
        assert all("extra" in answer["failed"][0] for answer in answers[1:])

    def test_if_only_such_a_source_has_a_version_nobody_has_one(self, pair: Cluster) -> None:
        answers = pair.run(sync_only_something_unsendable)
        assert answers[0] == "Unsendable"
        assert "rank 0 failed: x: " in answers[1]

    def test_values_that_can_not_be_sent_are_replaced_at_a_receiver(self, pair: Cluster) -> None:
        for text in pair.run(replace_unsendable_values):
            assert "weight: kind: incoming tensor float32[2], local a tensor on the meta device" in text

    def test_paths_that_nobody_has_are_lost(self, pair: Cluster) -> None:
        for error in errors_of(pair, sync_other_stages):
            assert isinstance(error, torchferry.PartsLost)
            assert isinstance(error, LookupError)
            assert error.parts == (torchferry.LostPart("model.module.w", "", (1,)),)
            assert "begin with `module.`: wrapped on one side only?" in str(error)

    def test_bad_arguments(self) -> None:
        for options, message in (
            ({"version": "3"}, "version must be an int"),
            ({"per_rank": [3]}, "per_rank must be a list of paths"),
            ({"per_rank": None}, "per_rank must be a list of paths, not None"),
            ({}, "there is no process group"),
        ):
            with pytest.raises(torchferry.BadArgument, match=message):
                torchferry.sync({}, **{"version": 1, **options})  # type: ignore[arg-type]


def sync_with_another_encoding(rank: int) -> Any:
    """Rank 1 describes its state in a way that this version can't decode."""
    if rank != 1:
        return catch_up(rank, [6, None, None, None], {})
    with mock.patch("torchferry.syncing.encode_value", return_value=b"\xc1"):
        return catch_up(rank, [6, None, None, None], {})


def test_every_rank_is_told_which_rank_describes_its_state_in_another_way(quad: Cluster) -> None:
    for error in errors_of(quad, sync_with_another_encoding):
        assert isinstance(error, torchferry.BadArgument)
        assert "the description of rank 1's state can't be decoded" in str(error)


def sync_another_shape(rank: int) -> dict[str, Any]:
    state = state_of(6.0 if rank in (0, 3) else 0.0, 6)
    if rank == 2:
        state["model"] = {"w": torch.zeros(999), "b": torch.zeros(3, dtype=torch.float16)}
        with pytest.raises(torchferry.StateMismatch) as raised:
            torchferry.sync(state, None, timeout=TIMEOUT_S)
        return {"error": str(raised.value), "unchanged": not state["model"]["w"].any()}
    result = torchferry.sync(state, 6 if rank in (0, 3) else None, timeout=TIMEOUT_S)
    return {"failed": result.failed, "value": state["model"]["w"][0].item()}


def sync_with_values_that_can_not_be_sent(rank: int) -> dict[str, Any] | str:
    """Receivers have large bytes and a function. Rank 2 also has an array that can't be written."""
    loader = np.ones(2, np.int64) if rank != 2 else np.frombuffer(bytes(16), np.int64)
    state: dict[str, Any] = {
        "w": torch.full((9,), 6.0),
        "extra": b"x" * 3_000_000,
        "loader": loader,
        "step": 1,
    }
    if rank > 0:
        state |= {"w": torch.zeros(9), "extra": b"y" * 3_000_000, "step": print}
    try:
        result = torchferry.sync(state, None if rank else 6, timeout=TIMEOUT_S)
    except torchferry.StateMismatch as error:
        return str(error)
    found = {"extra": result.state["extra"] == b"x" * 3_000_000, "loader": result.state["loader"].tolist()}
    assert result.state["step"] == 1
    return {**found, "failed": [*result.failed], "weight": state["w"][0].item()}


def sync_something_unsendable(rank: int) -> Any:
    state = state_of(6.0 if rank in (0, 3) else 0.0, 6)
    if rank == 0:
        state["model"]["w"] = {"extra": object()}
        with pytest.raises(torchferry.Unsendable) as raised:
            torchferry.sync(state, 6, timeout=TIMEOUT_S)
        return f"Unsendable: {raised.value.path}"
    result = torchferry.sync(state, 6 if rank == 3 else None, timeout=TIMEOUT_S)
    return {"failed": result.failed, "weight": state["model"]["w"][0].item()}


def sync_only_something_unsendable(rank: int) -> str:
    if rank == 0:
        with pytest.raises(torchferry.Unsendable):
            torchferry.sync({"x": object()}, 6, timeout=TIMEOUT_S)
        return "Unsendable"
    with pytest.raises(torchferry.NoSuchVersion) as raised:
        torchferry.sync({"x": torch.zeros(3)}, None, timeout=TIMEOUT_S)
    return str(raised.value)


def replace_unsendable_values(rank: int) -> Any:
    sent = {"step": 1, "large": b"x" * (1 << 17), "weight": torch.ones(2)}
    local = {"step": object(), "large": bytes(1 << 17), "weight": torch.zeros(2), "own": object()}
    result = torchferry.sync(local if rank else sent, None if rank else 1, timeout=TIMEOUT_S)
    assert result.state["step"] == 1
    assert result.state["large"] == sent["large"]
    local["weight"] = torch.zeros(2, device="meta")
    if rank == 0:
        return torchferry.sync(sent, 1, timeout=TIMEOUT_S).failed[1]
    with pytest.raises(torchferry.StateMismatch) as raised:
        torchferry.sync(local, None, timeout=TIMEOUT_S)
    return str(raised.value)


def sync_other_stages(rank: int) -> None:
    key = "w" if rank == 0 else "module.w"
    torchferry.sync({"model": {key: torch.ones(4)}, "step": 3}, 3 if rank == 0 else None, timeout=TIMEOUT_S)


class TestBroadcast:
    def test_copies_the_state_of_one_rank_to_all(self, quad: Cluster) -> None:
        assert quad.run(broadcast, 2) == [("receiver", 2.0)] * 2 + [("source", 2.0), ("receiver", 2.0)]

    def test_with_different_sources_is_an_error_everywhere(self, pair: Cluster) -> None:
        for error in errors_of(pair, broadcast_own):
            assert "rank 0 broadcast_state(source=0), rank 1 broadcast_state(source=1)" in str(error)


def broadcast(rank: int, source: int) -> tuple[str, float]:
    state = state_of(float(rank), rank)
    result = torchferry.broadcast_state(state, source)
    assert result.state["step"] == source
    return result.role, state["model"]["w"][0].item()


def broadcast_own(rank: int) -> None:
    torchferry.broadcast_state(state_of(1.0, 1), source=rank)


class TestHost:
    def test_listens_on_the_interface_of_gloo(self, pair: Cluster) -> None:
        assert pair.run(address_of_the_source, {"GLOO_SOCKET_IFNAME": "lo"}, None)[1] == "127.0.0.1"

    def test_listens_on_the_address_that_routes_to_the_master(self, pair: Cluster) -> None:
        assert pair.run(address_of_the_source, {"MASTER_ADDR": "127.0.0.9"}, None)[1].startswith("127.0.0.")

    def test_listens_on_loopback_otherwise(self, pair: Cluster) -> None:
        assert pair.run(address_of_the_source, {}, None)[1] == "127.0.0.1"

    def test_listens_where_it_is_told(self, pair: Cluster) -> None:
        assert pair.run(address_of_the_source, {}, "127.0.0.3")[1] == "127.0.0.3"


def address_of_the_source(rank: int, environment: dict[str, str], host: str | None) -> str:
    for name in ("GLOO_SOCKET_IFNAME", "MASTER_ADDR"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    result = torchferry.sync(state_of(1.0, 1), None if rank else 1, host=host, timeout=TIMEOUT_S)
    return "" if result.report is None else next(iter(result.report.sources)).rpartition(":")[0]
