"""PGTransport, and the names that its contract's tests use.

The underscored names are the contract's; each is a thin alias of something with a better one.
"""

from torchferry.engine.phases import timed as _timeit
from torchferry.pg_transport.contract import ContractStateMeta as _StateDictMeta
from torchferry.pg_transport.contract import ContractTensorMeta as _TensorMeta
from torchferry.pg_transport.contract import describe_state as _prepare_state_dict
from torchferry.pg_transport.contract import describe_tensor as _prepare_tensor
from torchferry.pg_transport.contract import storage_as as _cast_tensor
from torchferry.pg_transport.transport import PGTransport

__all__ = [
    "PGTransport",
    "_StateDictMeta",
    "_TensorMeta",
    "_cast_tensor",
    "_prepare_state_dict",
    "_prepare_tensor",
    "_timeit",
]
