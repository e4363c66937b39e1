"""The engine: the push over a link (`send`, `receive`), the pull over HTTP (`published`, `fetch`), and the
agreement of a sync (`coordination`, `bundles`).

It is the one place where core, tensors and links meet. It has the deadlines, threads, windows and staging.
"""

from torchferry.engine.receive import ReceiveOptions, receive_state
from torchferry.engine.send import SendOptions, send_state
from torchferry.engine.workspace import Workspace

__all__ = ["ReceiveOptions", "SendOptions", "Workspace", "receive_state", "send_state"]
