"""The defects of torch's PGTransport, row by row: torchferry's behaviour, and torch's.

The numbers are the rows of the table of defects that the design began with. When torch fixes a defect, its
half of the test fails, and the row can be removed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardMetadata, init_from_local_shards
from torch.distributed.checkpoint._pg_transport import PGTransport as TorchPGTransport
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.support.cluster import Cluster
from tests.support.equality import assert_same
from tests.support.transfer import transfer
from tests.unit.pg_transport.fake_group import TIMEOUT_S, Group, Mailboxes, TransportPair
from torchferry import BadArgument, PGTransport, PickleRefused, StateMismatch, StepMismatch, Unsendable
from torchferry.core.plan import WINDOW_BYTES
from torchferry.engine import workspace
from torchferry.engine.workspace import Staging
from torchferry.links.base import FRAME_TAG, LENGTH_TAG

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class TorchTransportPair(TransportPair):
    """A pair of torch's own transports. `nbytes` counts the sent bytes, with metadata."""

    def __init__(self, local: object = None) -> None:
        self.mailboxes = Mailboxes()
        self.group = Group(self.mailboxes, 1)
        timeout = timedelta(seconds=TIMEOUT_S)
        self.sender: Any = TorchPGTransport(Group(self.mailboxes, 0), timeout, CPU)  # type: ignore[arg-type]
        callback = None if local is None else lambda: local
        self.receiver: Any = TorchPGTransport(self.group, timeout, CPU, callback)  # type: ignore[arg-type]
        self.nbytes = 0

    def transfer(self, state: object) -> Any:
        self.sender.send_checkpoint([1], state)
        self.nbytes = sum(message.nbytes for box in self.mailboxes.boxes.values() for message in box)
        return self.receiver.recv_checkpoint(0)


def by_torch(state: object, into: object = None) -> Any:
    return TorchTransportPair(into).transfer(state)


class RunsCode:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return (os.mkdir, (str(self._path),))


def test_no_code_runs_in_the_receiver(tmp_path: Path) -> None:
    """Row 1."""
    transports = TransportPair()
    state = {"w": torch.ones(2), "leaf": RunsCode(tmp_path / "torchferry")}
    with pytest.raises(Unsendable, match="leaf"):
        transports.sender.send_checkpoint([1], state)
    TorchPGTransport(Group(transports.mailboxes, 0), timedelta(seconds=1), CPU).send_checkpoint([1], state)  # type: ignore[arg-type]
    for tag, ferry_tag in ((1, LENGTH_TAG), (2, FRAME_TAG)):
        transports.mailboxes.boxes[0, 1, ferry_tag] = transports.mailboxes.boxes[0, 1, tag]
    with pytest.raises(PickleRefused):
        transports.receiver.recv_checkpoint(0)
    assert not (tmp_path / "torchferry").exists()

    by_torch({"w": torch.ones(2), "leaf": RunsCode(tmp_path / "torch")})
    assert (tmp_path / "torch").exists()


def test_a_view_costs_only_its_own_bytes() -> None:
    """Row 4."""
    base = torch.zeros(1_000_000)
    views = [base[n * 1000 : n * 1000 + 100] for n in range(10)]
    assert transfer(views).payload_bytes == 4_000
    assert transfer({"slice": base[5:6]}).payload_bytes == 4

    torch_pair = TorchTransportPair()
    torch_pair.transfer(views)
    assert torch_pair.nbytes > 40_000_000


def test_tied_weights_are_sent_once_and_arrive_tied() -> None:
    """Row 5."""
    weight = torch.randn(1000)
    state = {"embed": weight, "head": weight, "part": weight[10:20]}
    transferred = transfer(state)
    assert_same(state, transferred.state)
    assert transferred.payload_bytes == 4_000

    torch_pair = TorchTransportPair()
    received = torch_pair.transfer({"embed": weight, "head": weight})
    assert received["embed"].data_ptr() != received["head"].data_ptr()
    assert torch_pair.nbytes > 8_000


class Subclass(torch.Tensor):
    pass


def test_parameters_and_sparse_tensors_are_sent_and_other_leaves_are_refused_at_the_sender() -> None:
    """Row 6."""
    sparse = torch.eye(3).to_sparse()
    state = {"p": torch.nn.Parameter(torch.ones(2)), "coo": sparse, "csr": torch.eye(3).to_sparse_csr()}
    assert_same(state, transfer(state).state)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for leaf in (torch.ones(2).as_subclass(Subclass), nested):
        with pytest.raises(Unsendable, match=r"^model\.odd: "):
            transfer({"model": {"odd": leaf}})

    with pytest.raises(AssertionError, match="standard tensors"):
        by_torch({"p": torch.nn.Parameter(torch.ones(2))})
    with pytest.raises(NotImplementedError):
        by_torch({"coo": sparse})


def test_in_place_dtype_and_shape_must_match() -> None:
    """Row 9."""
    local = {"w": torch.zeros(2, dtype=torch.int32)}
    with pytest.raises(StateMismatch, match="w: dtype: incoming float32, local int32"):
        transfer({"w": torch.tensor([1.5, 2.5])}, into=local)
    with pytest.raises(StateMismatch, match=r"w: shape: incoming \[2, 3\], local \[3, 2\]"):
        transfer({"w": torch.ones(2, 3)}, into={"w": torch.zeros(3, 2)})
    assert local["w"].tolist() == [0, 0]

    torch_local = {"w": torch.zeros(2, dtype=torch.int32)}
    by_torch({"w": torch.tensor([1.5, 2.5])}, into=torch_local)
    assert torch_local["w"][0] == 1069547520


def test_a_view_received_in_place_keeps_its_neighbours_and_any_layout_is_exact() -> None:
    """Row 10."""

    def receive_into_the_middle(transfer: Callable[..., Any]) -> list[float]:
        whole = torch.arange(4.0, 12.0)
        transfer({"w": torch.arange(4.0)}, into={"w": whole[2:6]})
        return whole.tolist()

    assert receive_into_the_middle(transfer) == [4, 5, 0, 1, 2, 3, 10, 11]
    local, sent = torch.zeros(3, 2).t(), torch.arange(6.0).view(2, 3)
    transfer({"w": sent}, into={"w": local})
    assert torch.equal(local, sent)

    with pytest.raises(AssertionError, match="same size"):
        receive_into_the_middle(by_torch)
    whole = torch.arange(4.0, 12.0)
    by_torch({"w": torch.arange(8.0)[4:]}, into={"w": whole[:4]})
    assert whole[:4].tolist() == [0, 1, 2, 3], "4 to 7 were sent"
    scrambled = torch.zeros(3, 2).t()
    by_torch({"w": sent}, into={"w": scrambled})
    assert not torch.equal(scrambled, sent)


def test_two_values_are_not_written_into_one_storage() -> None:
    """Row 11."""
    state = {"a": torch.tensor([1.0]), "b": torch.tensor([2.0])}
    tied = torch.zeros(1)
    with pytest.raises(StateMismatch, match="b: shares local memory with a"):
        transfer(state, into={"a": tied, "b": tied})
    assert tied.item() == 0

    by_torch(state, into={"a": tied, "b": tied})
    assert tied.item() == 2


def test_a_local_tensor_that_the_link_can_t_access_is_written_through_a_staging_copy() -> None:
    """Row 12. A link that accepts only its own memory treats the CPU as another type of device."""
    local = {"w": torch.zeros(100), "turned": torch.zeros(5, 4).t()}
    sent = {"w": torch.arange(100.0), "turned": torch.arange(20.0).view(4, 5)}
    received = transfer(sent, into=local, own_buffers=True, chunk_bytes=64).state
    assert received["w"] is local["w"]
    assert all(torch.equal(local[name], sent[name]) for name in sent)

    elsewhere = {"w": torch.zeros(2, device="meta")}
    assert by_torch({"w": torch.ones(2)}, into=elsewhere)["w"] is not elsewhere["w"]


def sharded(rank: int, scale: float) -> ShardedTensor:
    """Return two shards per rank, each with one row."""
    shards = [
        LocalShard(
            scale * torch.full((1, 4), float(row)),
            ShardMetadata([row, 0], [1, 4], placement=f"rank:{rank}/cpu"),
        )
        for row in (2 * rank, 2 * rank + 1)
    ]
    return init_from_local_shards(shards, 2 * dist.get_world_size(), 4)


def receive_shards_in_place(rank: int) -> tuple[bool, list[list[float]], str]:
    """All ranks create the tensor together; each transfers within its process, because torch's may fail."""
    mine = sharded(rank, scale=1.0)
    blank = sharded(rank, scale=0.0)
    transports = TransportPair({"s": blank})
    same = transports.transfer({"s": mine})["s"] is blank
    rows = [shard.tensor.flatten().tolist() for shard in blank.local_shards()]
    try:
        by_torch({"s": mine}, into={"s": sharded(rank, scale=0.0)})
    except AssertionError as error:
        return same, rows, str(error)
    return same, rows, ""


def test_a_sharded_tensor_is_received_in_place_with_all_its_shards(pair: Cluster) -> None:
    """Row 13."""
    for rank, (same, rows, torch_error) in enumerate(pair.run(receive_shards_in_place)):
        assert same
        assert rows == [[2.0 * rank] * 4, [2.0 * rank + 1] * 4]
        assert torch_error


def test_conj_and_neg_bits_are_exact() -> None:
    """Row 14."""
    number = torch.tensor([1 + 2j])
    state = {"conj": number.conj(), "neg": torch._neg_view(torch.tensor([2.0]))}
    received = transfer(state).state
    assert_same(state, received)
    assert received["conj"].item() == 1 - 2j
    assert received["neg"].item() == -2

    torch_state = by_torch(state)
    assert torch_state["conj"].item() == 1 + 2j
    assert torch_state["neg"].item() == 2


def test_odd_storages_and_quantized_tensors_are_exact() -> None:
    """Row 15."""
    raw = torch.arange(10, dtype=torch.uint8)
    words = torch.empty(0, dtype=torch.int32).set_(raw.untyped_storage(), 0, (2,), (1,))
    assert_same({"words": words}, transfer({"words": words}).state)
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    assert torch.equal(transfer({"q": quantized}).state["q"], quantized)

    with pytest.raises(RuntimeError, match="divisible"):
        by_torch({"words": words})
    with pytest.raises(Exception):  # noqa: B017, PT011 - any error shows that it is not usable
        by_torch({"q": quantized})["q"].dequantize()


def test_requires_grad_and_metadata_are_kept() -> None:
    """Row 16."""
    state = torch.nn.BatchNorm1d(3).state_dict()
    state["extra"] = torch.ones(2, requires_grad=True)
    received = transfer(state).state
    assert received["extra"].requires_grad
    assert received._metadata == state._metadata  # type: ignore[attr-defined]

    torch_state = by_torch(state)
    assert not torch_state["extra"].requires_grad
    assert not hasattr(torch_state, "_metadata")


def test_arrays_are_sent_as_payload_and_received_in_place_and_containers_keep_their_type() -> None:
    """Row 17."""
    array = numpy.arange(100_000)
    state = {"array": array, "count": Counter({3: 1}), "ordered": OrderedDict(a=array[:10])}
    transferred = transfer(state)
    assert_same(state, transferred.state)
    assert transferred.payload_bytes == array.nbytes
    assert transferred.report.metadata_bytes < 1_000
    local = numpy.zeros(100_000, dtype=array.dtype)
    assert transfer({"array": array}, into={"array": local}).state["array"] is local
    assert numpy.array_equal(local, array)

    torch_pair = TorchTransportPair()
    torch_pair.transfer({"array": array})
    assert {tag for (_, _, tag) in torch_pair.mailboxes.boxes} == {1, 2}, "the array is not in the metadata"
    assert torch_pair.nbytes > array.nbytes


def test_extra_and_missing_keys_are_refused_unless_strict_is_false() -> None:
    """Row 18."""
    state = {"both": torch.ones(2), "theirs": torch.ones(2)}
    local = {"both": torch.zeros(2), "mine": torch.zeros(2)}
    with pytest.raises(StateMismatch) as raised:
        transfer(state, into=local)
    assert [mismatch.path for mismatch in raised.value.mismatches] == ["theirs", "mine"]
    assert local["both"].tolist() == [0, 0]
    received = transfer(state, into=local, strict=False).state
    assert list(received) == ["both", "mine"]
    assert local["both"].tolist() == [1, 1]

    assert list(by_torch(state, into=local)) == ["both", "theirs"]


def transfer_dtensors(rank: int) -> dict[str, Any]:
    """Ranks 0 and 1 send their shards of a DTensor to ranks 2 and 3: fresh, with `mesh=`, in place."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    twin = (rank + 2) % 4
    placements = [Replicate(), Shard(0)]
    whole = torch.arange(32.0).view(8, 4)
    mine = DTensor.from_local(whole[4 * (rank % 2) :][:4].clone(), mesh, placements)
    fresh = PGTransport(dist.group.WORLD, 20, "cpu")
    named = PGTransport(dist.group.WORLD, 20, "cpu", mesh=mesh)
    target = DTensor.from_local(torch.zeros(4, 4), mesh, placements)
    in_place = PGTransport(dist.group.WORLD, 20, "cpu", lambda: {"d": target})
    if rank < 2:
        for transport in (fresh, named, in_place):
            transport.send_checkpoint([twin], {"d": mine})
        received: Any = {"fresh": mine, "named": mine}
        target.to_local().copy_(mine.to_local())
    else:
        received = {"fresh": fresh.recv_checkpoint(twin), "named": named.recv_checkpoint(twin)}
        received = {name: state["d"] for name, state in received.items()}
        assert in_place.recv_checkpoint(twin)["d"] is target  # type: ignore[index]
    return {
        "coordinate": received["fresh"].device_mesh.get_coordinate(),
        "equal mesh": received["fresh"].device_mesh == mesh,
        "local": received["fresh"].to_local().tolist(),
        "element-wise": (received["fresh"] + mine).to_local().tolist(),
        "named": received["named"].full_tensor().tolist(),
        "in place": target.full_tensor().tolist(),
        "fresh": received["fresh"].full_tensor().tolist(),
        "local arithmetic": DTensor.full_tensor(mine + mine).tolist(),  # type: ignore[arg-type]
        "torch's": coordinate_by_torch(rank, mine),
    }


def coordinate_by_torch(rank: int, mine: DTensor) -> Any:
    """Return the coordinate in the mesh that rank 3 receives from rank 0 by torch's transport."""
    transport = TorchPGTransport(dist.group.WORLD, timedelta(seconds=20), CPU)  # type: ignore[arg-type]
    if rank == 0:
        transport.send_checkpoint([3], {"d": mine})
    elif rank == 3:
        return transport.recv_checkpoint(0)["d"].device_mesh.get_coordinate()  # type: ignore[index]
    return None


def test_a_dtensor_is_bound_to_the_receiver_s_mesh(quad: Cluster) -> None:
    """Row 19."""
    whole = torch.arange(32.0).view(8, 4)
    answers = quad.run(transfer_dtensors)
    for rank, answer in enumerate(answers):
        part = whole[4 * (rank % 2) :][:4]
        assert tuple(answer["coordinate"]) == (rank // 2, rank % 2)
        assert answer["equal mesh"]
        assert answer["local"] == part.tolist()
        assert answer["element-wise"] == (2 * part).tolist()
        assert answer["fresh"] == answer["named"] == answer["in place"] == whole.tolist()
        assert answer["local arithmetic"] == (2 * whole).tolist()
    assert tuple(answers[3]["torch's"]) == (0, 0)


def test_a_device_is_accepted_by_its_name() -> None:
    """Row 27."""
    transports = TransportPair()
    transports.receiver = PGTransport(transports.group, 10, "cpu", lambda: {"w": torch.zeros(2)})
    assert transports.transfer({"w": torch.ones(2)})["w"].tolist() == [1, 1]

    torch_pair = TorchTransportPair({"w": torch.zeros(2)})
    torch_pair.receiver._device = "cpu"
    with pytest.raises(AttributeError):
        torch_pair.transfer({"w": torch.ones(2)})


WITHOUT_NUMPY = """
import sys, warnings
sys.modules["numpy"] = None  # importing it fails from here on
warnings.simplefilter("ignore")
from datetime import timedelta
import torch
from torch.distributed.checkpoint._pg_transport import PGTransport as TorchPGTransport
from tests.unit.pg_transport.fake_group import TransportPair, Group

transports, cpu = TransportPair(), torch.device("cpu")
print("torchferry:", transports.transfer({"w": torch.arange(3.0)})["w"].tolist())
sender = TorchPGTransport(Group(transports.mailboxes, 0), timedelta(seconds=5), cpu)
sender.send_checkpoint([1], {"w": torch.ones(3)})
try:
    TorchPGTransport(transports.group, timedelta(seconds=5), cpu).recv_checkpoint(0)
except RuntimeError as error:
    print("torch:", error)
"""


def test_numpy_is_not_needed() -> None:
    """Row 28."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NUMPY],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["torchferry: [0.0, 1.0, 2.0]", "torch: Numpy is not available"]


def transfer_in_a_subgroup(rank: int) -> Any:
    """Ranks 2 and 3 of the world are ranks 0 and 1 of a smaller group."""
    group = dist.new_group([2, 3])
    if rank < 2:
        return None
    transport = PGTransport(group, 10, "cpu")
    if rank == 2:
        with pytest.raises(BadArgument) as raised:
            transport.send_checkpoint([3], {"w": torch.ones(2)})
        transport.send_checkpoint([1], {"w": torch.ones(2)})
        return str(raised.value)
    return transport.recv_checkpoint(0)["w"].tolist()  # type: ignore[index]


def test_ranks_are_group_ranks_and_a_global_rank_is_refused(quad: Cluster) -> None:
    """Row 29. torch's waits for the missing rank until the test itself times out."""
    assert "**in that group**" in (PGTransport.__doc__ or "")
    _, _, message, received = quad.run(transfer_in_a_subgroup)
    assert message.startswith("rank 3 is not in the group, which has ranks 0 to 1")
    assert "get_group_rank" in message
    assert received == [1, 1]


def test_a_step_is_checked_with_both_values_in_the_error() -> None:
    """Row 30."""
    transports = TransportPair()
    transports.sender.send_checkpoint([1], {"w": torch.ones(2)}, step=41)
    with pytest.raises(StepMismatch, match=r"(?s)step 42.*step 41"):
        transports.receiver.recv_checkpoint(0, step=42)

    with pytest.raises(TypeError, match="step"):
        TorchTransportPair().sender.send_checkpoint([1], {"w": torch.ones(2)}, step=41)


def test_staging_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 31. On a link that accepts only its own memory, every byte of the state is staged.

    torch's staging can't be tested without an accelerator.
    """
    held: dict[int, int] = {}
    most = 0

    class Counted(Staging):
        def take(self, nbytes: int, *, pinned: bool = False) -> torch.Tensor:
            nonlocal most
            buffer = super().take(nbytes, pinned=pinned)
            held[buffer.data_ptr()] = buffer.untyped_storage().nbytes()
            most = max(most, sum(held.values()))
            return buffer

    monkeypatch.setattr(workspace, "Staging", Counted)
    state = {"large": torch.empty(3 * WINDOW_BYTES, dtype=torch.uint8).random_()}
    local = {"large": torch.zeros(3 * WINDOW_BYTES, dtype=torch.uint8)}
    transfer(state, into=local, own_buffers=True)
    assert torch.equal(local["large"], state["large"])
    assert 0 < most <= 2 * WINDOW_BYTES, "more than one window on each side is staged"
