"""Checks of options that are numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from .errors import ConfigurationError


def check_numbers(where: str, options: Any, most: Mapping[str, float] | None = None) -> None:
    """Refuse fields of a dataclass that are not finite numbers above 0, whole ones where the default is whole. Fields
    whose default is no number are left out. ``where`` begins the message, and ``most`` names upper bounds.
    """
    for option in fields(options):
        if isinstance(option.default, bool) or not isinstance(option.default, int | float):
            continue
        given, whole = getattr(options, option.name), isinstance(option.default, int)
        bound = (most or {}).get(option.name, math.inf)
        is_number = isinstance(given, int if whole else int | float) and not isinstance(given, bool)
        if not is_number or not 0 < given <= bound or given == math.inf:
            what = "a whole number" if whole else "a number"
            bounds = "above 0" if bound == math.inf else f"above 0 and up to {bound:,}"
            raise ConfigurationError(f"{where}: {option.name} must be {what} {bounds}, got {given!r}")
