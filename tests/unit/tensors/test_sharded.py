"""ShardedTensors: all local shards arrive with the metadata of the whole tensor, fresh and in place.

This process is in no group. tests/defects and tests/fsdp have tests with real ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor import Shard, ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensorBase
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties

from tests.support.equality import assert_same
from tests.support.transfer import transfer
from tests.unit.tensors.refusing import refusal_at_a_path
from torchferry.errors import StateMismatch

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor instead")


def sharded(*shards: torch.Tensor, rows: tuple[int, ...] = (0, 2), requires_grad: bool = False) -> Any:
    """Return a 6 x 3 tensor in shards of two rows. The local shards start at `rows`."""
    all_shards = [
        ShardMetadata([row, 0], [2, 3], placement=f"rank:{owner}/cpu")
        for row, owner in ((0, 0), (2, 0), (4, 1))
    ]
    whole = ShardedTensorMetadata(
        shards_metadata=all_shards,
        size=torch.Size((6, 3)),
        tensor_properties=TensorProperties(dtype=shards[0].dtype, requires_grad=requires_grad),
    )
    here = {meta.shard_offsets[0]: meta for meta in all_shards}
    built: Any = ShardedTensorBase._init_from_local_shards_and_global_metadata(
        [Shard(shard, here[row]) for shard, row in zip(shards, rows, strict=True)], whole
    )
    built._metadata, built._process_group = whole, None
    return built


def two_shards(scale: float = 1.0) -> Any:
    return sharded(scale * torch.arange(6.0).view(2, 3), scale * torch.arange(6.0, 12.0).view(2, 3))


@pytest.mark.parametrize("own_buffers", [False, True], ids=["direct", "staged"])
def test_all_local_shards_arrive_with_their_offsets_and_sizes(own_buffers: bool) -> None:
    ferried = transfer({"s": two_shards()}, own_buffers=own_buffers)
    assert_same({"s": two_shards()}, ferried.state)
    assert ferried.payload_bytes == 48


def test_the_metadata_of_the_whole_tensor_arrives() -> None:
    tensor = transfer({"s": two_shards()}).state["s"]
    assert tensor.size() == torch.Size((6, 3))
    received = tensor.metadata()
    original = two_shards().metadata()
    assert received.size == original.size
    assert received.tensor_properties == original.tensor_properties
    assert [m.shard_offsets for m in received.shards_metadata] == [[0, 0], [2, 0], [4, 0]]
    assert [str(m.placement) for m in received.shards_metadata][2] == "rank:1/cpu"


def test_shards_of_one_storage_send_each_byte_once() -> None:
    whole = torch.arange(18.0).view(6, 3)
    state = {"s": sharded(whole[:2], whole[2:4]), "row": whole[1]}
    ferried = transfer(state)
    assert_same(state, ferried.state)
    assert ferried.payload_bytes == 48


def test_requires_grad_of_the_shards_arrives() -> None:
    original = sharded(torch.ones(2, 3, requires_grad=True), rows=(2,), requires_grad=True)
    received = transfer({"s": original}).state["s"]
    assert received.local_shards()[0].tensor.requires_grad


def test_in_place_all_local_shards_are_overwritten() -> None:
    local = two_shards(scale=-1)
    tensors = [shard.tensor for shard in local.local_shards()]
    received = transfer({"s": two_shards()}, into={"s": local}).state["s"]
    assert received is local
    for shard, tensor in zip(received.local_shards(), tensors, strict=True):
        assert shard.tensor is tensor
    assert_same(two_shards(), received)


@pytest.mark.parametrize(
    ("local", "what"),
    [
        (sharded(torch.zeros(2, 3), torch.zeros(2, 3), rows=(2, 4)), "local shards"),
        (sharded(torch.zeros(2, 3), rows=(0,)), "local shards"),
        (torch.zeros(4, 3), "kind"),
        (sharded(*[torch.zeros(2, 3, dtype=torch.float64)] * 2), "dtype"),
    ],
)
def test_in_place_offsets_sizes_dtype_and_kind_must_match(local: Any, what: str) -> None:
    with pytest.raises(StateMismatch) as raised:
        transfer({"s": two_shards()}, into={"s": local})
    assert {mismatch.path for mismatch in raised.value.mismatches} == {"s"}
    assert what in {mismatch.what for mismatch in raised.value.mismatches}


def test_an_unsendable_shard_is_refused_with_the_path_of_the_tensor() -> None:
    odd = two_shards()
    odd.local_shards()[1].tensor = torch.ones(2, 3, device="meta")
    assert "meta device" in refusal_at_a_path(odd)
