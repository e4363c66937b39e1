"""Live PyTorch state from the processes that have it to the processes that need it, with no disk between.

>>> from torchferry import PGTransport
"""

from torchferry.core.report import Report
from torchferry.errors import (
    BadArgument,
    BadManifest,
    Corrupted,
    FerryError,
    GroupBroken,
    LinkBroken,
    LinkError,
    LinkStalled,
    LinkTimeout,
    Mismatch,
    PeerError,
    PeerGaveUp,
    PickleRefused,
    SendBroken,
    SendFailed,
    SendLate,
    StateChanged,
    StateError,
    StateMismatch,
    StepMismatch,
    TargetTorn,
    TornAndBroken,
    TornAndLate,
    UnknownType,
    Unsendable,
)
from torchferry.pg_transport import PGTransport
from torchferry.tensors.registry import register

__version__ = "0.1.0"

__all__ = [
    "BadArgument",
    "BadManifest",
    "Corrupted",
    "FerryError",
    "GroupBroken",
    "LinkBroken",
    "LinkError",
    "LinkStalled",
    "LinkTimeout",
    "Mismatch",
    "PGTransport",
    "PeerError",
    "PeerGaveUp",
    "PickleRefused",
    "Report",
    "SendBroken",
    "SendFailed",
    "SendLate",
    "StateChanged",
    "StateError",
    "StateMismatch",
    "StepMismatch",
    "TargetTorn",
    "TornAndBroken",
    "TornAndLate",
    "UnknownType",
    "Unsendable",
    "__version__",
    "register",
]
