"""The push of a state over a process group: `send` and `receive`, in lanes that watch their peers."""

from torchferry.engine.push.receive import ReceiveOptions, receive_state
from torchferry.engine.push.send import SendOptions, send_state

__all__ = ["ReceiveOptions", "SendOptions", "receive_state", "send_state"]
