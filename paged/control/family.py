"""Samples of one prompt: one of them feeds it, and the others fork its pages (requirement C9)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paged.common.errors import InternalError

if TYPE_CHECKING:
    from paged.control.requests import Request


class Family:
    """Unfinished requests with one prompt.

    - `leader`: the one that feeds the prompt now, if any does. While there is a leader no other member is admitted:
      it is about to have what they need.
    - `held`: members that were first in turn meanwhile. They stand aside, so that nobody waits behind them.

    A member whose whole prompt is in the cache for sure, all its steps collected, is a source to fork from. When the
    leader goes before it gets there, the next in turn leads.
    """

    def __init__(self) -> None:
        self.members: list[Request] = []
        self.leader: Request | None = None
        self.held: list[Request] = []

    def source(self) -> Request | None:
        """A member to fork from, or None."""
        return next((member for member in self.members if member.shares_prompt), None)

    def verify(self) -> None:
        """Prove that nobody stands aside for nothing; raises `InternalError`."""
        if self.leader is not None and (self.leader.handle is None or self.leader.shares_prompt):
            raise InternalError(f"Family: {self.leader} leads, and it is not feeding its prompt.")
        if self.held and self.leader is None:
            raise InternalError(f"Family: {self.held[0]} stands aside, and nobody leads.")
        for member in self.members:
            if member.shares_prompt and member.handle is None:
                raise InternalError(f"Family: {member} shares its prompt and has no pages.")
