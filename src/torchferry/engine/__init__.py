"""Runs a plan on a link: the one place where core, tensors and links meet.

`push` sends a described state to peers that are waiting for it; `pull` receives one. Everything that is
policy (one deadline, a bounded window, what is staged) is here, and in no link.
"""

from torchferry.engine.cargo import Push
from torchferry.engine.group import Group, group_of
from torchferry.engine.receiving import Pull, pull
from torchferry.engine.sending import push

__all__ = ["Group", "Pull", "Push", "group_of", "pull", "push"]
