"""Live PyTorch state from the processes that have it to the processes that need it, with no disk between.

>>> from torchferry import PGTransport
"""

from torchferry.core.report import Report
from torchferry.errors import (
    BadArgument,
    BadManifest,
    FerryError,
    LinkBroken,
    LinkError,
    LinkTimeout,
    Mismatch,
    PeerError,
    PickleRefused,
    StateError,
    StateMismatch,
    StepMismatch,
    UnknownType,
    Unsendable,
)
from torchferry.pg_transport import PGTransport
from torchferry.tensors.registry import register

__version__ = "0.1.0"

__all__ = [
    "BadArgument",
    "BadManifest",
    "FerryError",
    "LinkBroken",
    "LinkError",
    "LinkTimeout",
    "Mismatch",
    "PGTransport",
    "PeerError",
    "PickleRefused",
    "Report",
    "StateError",
    "StateMismatch",
    "StepMismatch",
    "UnknownType",
    "Unsendable",
    "__version__",
    "register",
]
