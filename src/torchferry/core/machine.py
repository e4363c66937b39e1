"""The state machine of one end of a protocol: an enum whose members name the states that may follow them."""

from typing import Generic, Protocol, TypeVar


class State(Protocol):
    """A member of such an enum."""

    label: str
    following: tuple[str, ...]


StateT = TypeVar("StateT", bound=State)


class Machine(Generic[StateT]):
    """The current state of one end. Any state may also end with an error."""

    def __init__(self, start: StateT) -> None:
        self.state: StateT = start

    def advance(self, to: StateT) -> None:
        """Enter a state that may follow the current one."""
        assert to.label in self.state.following, f"{self.state} is not followed by {to}"
        self.state = to
