"""Read models: tables that events write, and that can be rebuilt from them."""

from __future__ import annotations

from .change import Add, Change
from .projection import Projection, ProjectionRow, Tally, on

__all__ = ["Add", "Change", "Projection", "ProjectionRow", "Tally", "on"]
