"""Moves live PyTorch state from the processes that have it to the processes that need it, without a disk.

>>> import torchferry
>>> with torchferry.serve({"step": 7}, version=7) as source:
...     torchferry.fetch(source.address).state
{'step': 7}
"""

from torchferry.core.leases import Reader as Reader
from torchferry.core.report import FetchReport as FetchReport
from torchferry.core.report import Report as Report
from torchferry.core.report import SourceReport as SourceReport
from torchferry.engine.pull.caller import ProgressEvent as ProgressEvent
from torchferry.engine.pull.fetch import Fetched as Fetched
from torchferry.errors import BadArgument as BadArgument
from torchferry.errors import BadManifest as BadManifest
from torchferry.errors import CheckpointTimeout as CheckpointTimeout
from torchferry.errors import Corrupted as Corrupted
from torchferry.errors import Difference as Difference
from torchferry.errors import FerryError as FerryError
from torchferry.errors import GroupBroken as GroupBroken
from torchferry.errors import LinkBroken as LinkBroken
from torchferry.errors import LinkError as LinkError
from torchferry.errors import LinkStalled as LinkStalled
from torchferry.errors import LinkTimeout as LinkTimeout
from torchferry.errors import LostPart as LostPart
from torchferry.errors import Mismatch as Mismatch
from torchferry.errors import NoSuchVersion as NoSuchVersion
from torchferry.errors import NotAuthorized as NotAuthorized
from torchferry.errors import PartsLost as PartsLost
from torchferry.errors import PeerError as PeerError
from torchferry.errors import PeerGaveUp as PeerGaveUp
from torchferry.errors import PickleRefused as PickleRefused
from torchferry.errors import ReadersRemain as ReadersRemain
from torchferry.errors import ReplicasDiffer as ReplicasDiffer
from torchferry.errors import SendBroken as SendBroken
from torchferry.errors import SendFailed as SendFailed
from torchferry.errors import SendLate as SendLate
from torchferry.errors import SourcesLost as SourcesLost
from torchferry.errors import StateChanged as StateChanged
from torchferry.errors import StateError as StateError
from torchferry.errors import StateMismatch as StateMismatch
from torchferry.errors import StepMismatch as StepMismatch
from torchferry.errors import TargetTorn as TargetTorn
from torchferry.errors import TornAndBroken as TornAndBroken
from torchferry.errors import TornAndLate as TornAndLate
from torchferry.errors import UnknownType as UnknownType
from torchferry.errors import Unsendable as Unsendable
from torchferry.fetching import fetch as fetch
from torchferry.pg_transport import PGTransport as PGTransport
from torchferry.serving import Source as Source
from torchferry.serving import Status as Status
from torchferry.serving import serve as serve
from torchferry.syncing import Synced as Synced
from torchferry.syncing import broadcast_state as broadcast_state
from torchferry.syncing import sync as sync
from torchferry.tensors.registry import register as register
from torchferry.tensors.registry import register_known as register_known
from torchferry.tensors.rng import RNG as RNG

__version__ = "0.1.0"
