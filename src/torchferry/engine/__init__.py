"""The push engine: sends a state over a link, and receives one.

The engine is the one place where core, tensors and links meet. It has the deadlines, windows and staging.
"""

from torchferry.engine.receive import ReceiveOptions, receive_state
from torchferry.engine.send import SendOptions, send_state
from torchferry.engine.workspace import Workspace

__all__ = ["ReceiveOptions", "SendOptions", "Workspace", "receive_state", "send_state"]
