"""Strided tensors and parameters of every dtype and layout arrive bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.support.equality import assert_same, bytes_of
from tests.support.transfer import transfer
from tests.unit.tensors.refusing import refusal_at_a_path

ALL_DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
QUANTIZED = [dtype for dtype in ALL_DTYPES if str(dtype).startswith("torch.q")]
DTYPES = [dtype for dtype in ALL_DTYPES if dtype not in QUANTIZED]

# Warnings of torch: complex32 is experimental, quantized and nested tensors are deprecated.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in ("ComplexHalf", "torch.quantize_per", "The PyTorch API of nested tensors")
]

staged = pytest.mark.parametrize("own_buffers", [False, True], ids=["direct", "staged"])


def noise(dtype: torch.dtype, shape: tuple[int, ...] = (3, 5)) -> torch.Tensor:
    """Return a tensor of random bytes, with NaNs that have a payload and with invalid items."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    stride = torch.empty(shape, device="meta").stride()
    return torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, shape, stride)


def zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    blank = torch.zeros(tensor.numel() * tensor.itemsize, dtype=torch.uint8)
    stride = torch.empty(tensor.shape, device="meta").stride()
    return torch.empty(0, dtype=tensor.dtype).set_(blank.untyped_storage(), 0, tuple(tensor.shape), stride)


def test_the_list_of_dtypes_is_complete() -> None:
    assert {torch.bool, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2} < set(DTYPES)
    assert {torch.complex32, torch.complex64, torch.complex128, torch.uint16, torch.uint64} < set(DTYPES)
    assert len(QUANTIZED) == 5


@staged
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_arrives_bit_for_bit(dtype: torch.dtype, own_buffers: bool) -> None:
    state = {"w": noise(dtype), "turned": noise(dtype, (4, 2)).t()}
    ferried = transfer(state, own_buffers=own_buffers)
    assert_same(state, ferried.state)
    assert ferried.payload_bytes == (15 + 8) * dtype.itemsize


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_can_be_received_into_another_layout(dtype: torch.dtype) -> None:
    """torch has no copy kernel for some of them."""
    turned, whole = noise(dtype, (5, 3)).t(), noise(dtype, (5,)).as_strided((3, 3), (1, 1))
    local = {"turned": zeros_like(turned), "whole": zeros_like(whole)}
    transfer({"turned": turned, "whole": whole}, into=local)
    assert bytes_of(local["turned"]) == bytes_of(turned)
    assert bytes_of(local["whole"]) == bytes_of(whole)


BASE = torch.arange(48.0)
LAYOUTS = {
    "0-dim": (torch.tensor(3.5), 4),
    "0-dim of a larger storage": (BASE[7], 4),
    "one item with a stride": (BASE[::9][:1], 4),
    "empty": (torch.empty(0), 0),
    "empty with a shape": (torch.empty(3, 0, 2).transpose(0, 2), 0),
    "empty in a larger storage": (BASE[5:5], 0),
    "strided": (BASE[::5], 40),
    "transposed": (BASE.view(6, 8).t(), 192),
    "permuted": (BASE.view(2, 4, 6).permute(2, 0, 1), 192),
    "offset": (BASE[10:20], 40),
    "a column": (BASE.view(6, 8)[:, 3], 24),
    "columns": (BASE.view(6, 8)[1:5, 2:4], 32),
    "a step in both": (BASE.view(6, 8)[::2, ::3], 36),
    "expanded": (BASE[:6].view(6, 1).expand(6, 4), 24),
    "expanded from one item": (torch.tensor(2.0).expand(3, 4), 4),
    "expanded and strided": (BASE.view(6, 8)[::2, :1].expand(3, 5), 12),
    "channels_last": (torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), 384),
    "channels_last_3d": (torch.randn(2, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d), 192),
    "overlapping itself": (BASE[:10].unfold(0, 3, 1), 40),
    "interlocked": (BASE.as_strided((3, 2), (2, 3)), 24),
    "a diagonal": (BASE.view(6, 8).diagonal(), 24),
}


@staged
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_arrives_with_its_strides_and_sends_only_its_own_bytes(
    name: str, own_buffers: bool
) -> None:
    tensor, nbytes = LAYOUTS[name]
    ferried = transfer({"t": tensor}, own_buffers=own_buffers)
    assert_same({"t": tensor}, ferried.state)
    assert ferried.payload_bytes == nbytes


@staged
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_can_be_received_into_a_contiguous_tensor(name: str, own_buffers: bool) -> None:
    tensor, _ = LAYOUTS[name]
    local = torch.full(tensor.shape, -1.0)
    received = transfer({"t": tensor}, into={"t": local}, own_buffers=own_buffers).state
    assert received["t"] is local
    assert torch.equal(local, tensor)


def test_channels_last_arrives_as_channels_last() -> None:
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    received = transfer({"image": image}).state["image"]
    assert received.is_contiguous(memory_format=torch.channels_last)
    assert not received.is_contiguous()


def test_a_received_tensor_can_be_modified_and_resized() -> None:
    received = transfer({"t": BASE[10:20]}).state["t"]
    received.add_(1).resize_(40)
    assert received[0] == 11
    assert BASE[10] == 10


@pytest.mark.parametrize("chunk_bytes", [16, 48, 64, 1 << 20])
def test_the_result_does_not_depend_on_the_chunk_size(chunk_bytes: int) -> None:
    state = {name: tensor for name, (tensor, _) in LAYOUTS.items() if tensor.numel()}
    # Cloned, because views of one storage would be cut into other chunks.
    state = {name: tensor.clone(memory_format=torch.preserve_format) for name, tensor in state.items()}
    state["columns"] = LAYOUTS["columns"][0]
    assert_same(state, transfer(state, chunk_bytes=chunk_bytes).state)
    assert_same(state, transfer(state, chunk_bytes=chunk_bytes, own_buffers=True).state)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("own_buffers", [False, True])
def test_parameters_and_requires_grad_arrive(requires_grad: bool, own_buffers: bool) -> None:
    state = {
        "parameter": torch.nn.Parameter(torch.randn(3), requires_grad=requires_grad),
        "tensor": torch.randn(3).requires_grad_(requires_grad),
        "view": torch.randn(4, 4)[1].requires_grad_(requires_grad),
    }
    received = transfer(state, own_buffers=own_buffers).state
    assert_same(state, received)
    assert type(received["parameter"]) is torch.nn.Parameter
    assert all(value.is_leaf for value in received.values())
    if requires_grad:
        sum(value.sum() for value in received.values()).backward()
        assert torch.equal(received["view"].grad, torch.ones(4))


def test_a_computed_tensor_arrives_as_a_leaf_that_requires_grad() -> None:
    computed = torch.ones(3, requires_grad=True) * 2
    received = transfer({"t": computed}).state["t"]
    assert received.requires_grad
    assert received.is_leaf
    assert torch.equal(received, computed)


def test_an_integer_parameter_arrives() -> None:
    state = {"p": torch.nn.Parameter(torch.arange(3), requires_grad=False)}
    assert_same(state, transfer(state).state)


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_conj_and_neg_views_arrive_as_views(dtype: torch.dtype) -> None:
    base = torch.view_as_complex(torch.arange(12.0, dtype=torch.float64).view(6, 2)).to(dtype)
    state = {
        "conj": base.conj(),
        "neg": torch._neg_view(base.real),
        "imag of conj": base.conj().imag,
        "both": torch._neg_view(base.conj()),
        "strided": base.conj()[::2],
    }
    ferried = transfer(state)
    assert_same(state, ferried.state)
    assert ferried.state["conj"].is_conj()
    assert ferried.state["imag of conj"].is_neg()
    assert ferried.payload_bytes == base.nbytes


def test_a_conj_view_that_requires_grad_arrives() -> None:
    state = {"t": torch.tensor([1 + 2j, 3 - 4j]).conj().requires_grad_()}
    assert_same(state, transfer(state).state)


@pytest.mark.parametrize("own_buffers", [False, True])
@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_in_place_conj_views_are_resolved_if_the_sides_differ(dtype: torch.dtype, own_buffers: bool) -> None:
    base = torch.tensor([1 + 2j, 3 - 4j, 5 + 6j], dtype=dtype)
    plain, conj = torch.zeros(3, dtype=dtype), torch.zeros(3, dtype=dtype).conj()
    transfer({"a": base.conj(), "b": base}, into={"a": plain, "b": conj}, own_buffers=own_buffers)
    assert plain.tolist() == [1 - 2j, 3 + 4j, 5 - 6j]
    assert conj.is_conj()
    assert conj.tolist() == base.tolist()


def test_in_place_neg_views_are_resolved_if_the_sides_differ() -> None:
    plain, neg = torch.zeros(2), torch._neg_view(torch.zeros(2))
    incoming = {"a": torch._neg_view(torch.tensor([1.0, -2.0])), "b": torch.tensor([3.0, -4.0])}
    transfer(incoming, into={"a": plain, "b": neg})
    assert plain.tolist() == [-1.0, 2.0]
    assert neg.tolist() == [3.0, -4.0]


def test_inference_tensors_can_be_sent_and_overwritten() -> None:
    with torch.inference_mode():
        state, local = {"t": torch.arange(3.0)}, {"t": torch.zeros(3)}
    assert transfer(state).state["t"].tolist() == [0, 1, 2]
    assert transfer(state, into=local).state["t"] is local["t"]
    assert local["t"].tolist() == [0, 1, 2]


def test_autograd_detects_that_a_tensor_was_overwritten() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * weight).sum()
    transfer({"w": torch.zeros(3)}, into={"w": weight})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_a_quantized_dtype_without_a_scale_is_refused(dtype: torch.dtype) -> None:
    raw = torch.zeros(16, dtype=torch.uint8)
    message = refusal_at_a_path(torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, (4,), (1,)))
    assert str(dtype) in message


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


def freed() -> torch.Tensor:
    tensor = torch.arange(4.0)
    tensor.untyped_storage().resize_(0)
    return tensor


REFUSED: dict[str, tuple[Callable[[], object], list[str]]] = {
    "subclass": (lambda: torch.ones(2).as_subclass(Subclass), ["test_dense.Subclass", "as_subclass"]),
    "uninitialized": (torch.nn.UninitializedParameter, ["a lazy parameter", "run a forward pass first"]),
    "nested": (lambda: nested(torch.strided), ["nested", "made of"]),
    "jagged": (lambda: nested(torch.jagged), ["NestedTensor", "torchferry.register(NestedTensor)"]),
    "mkldnn": (lambda: torch.ones(2).to_mkldnn(), ["torch._mkldnn", "made of"]),
    "meta": (lambda: torch.ones(2, device="meta"), ["meta device", "materialise"]),
    "zeros without data": (lambda: torch._efficientzerotensor(3), ["without data", "clone"]),
    "freed": (freed, ["[4]", "0 bytes of the 16", "freed"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsendable_tensor_is_refused_with_its_path_and_advice(name: str) -> None:
    make, said = REFUSED[name]
    message = refusal_at_a_path(make())
    assert [words for words in said if words not in message] == []


def test_a_tensor_with_freed_memory_gets_no_new_memory() -> None:
    """A view of it as bytes would allocate memory that is never freed."""
    tensor = freed()
    refusal_at_a_path(tensor)
    assert tensor.untyped_storage().nbytes() == 0
