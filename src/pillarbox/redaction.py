"""Removes secrets from the texts of errors."""

from __future__ import annotations

import asyncio
import re

MAX_CHARACTERS = 500

_SECRETS = (
    (re.compile(r"\[(?:SQL|parameters): .*|\bDETAIL: .*"), "…"),  # they quote user data
    (re.compile(r"(://[^:/@\s]*):[^/\s]*@"), r"\1:***@"),
    (re.compile(r"://[^:/@\s]+@"), "://***@"),
    (re.compile(r"eyJ[\w-]+\.[\w-]+\.[\w-]*"), "***"),
    (re.compile(r"-----BEGIN [^-]+-----.*?(-----END [^-]+-----|$)"), "***"),
    (re.compile(r"(?i)\b(authorization[\"']?\s*[:=]\s*[\"']?\w+|bearer|basic)\s+[\w.~+/=-]+"), r"\1 ***"),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), "***"),
    (
        re.compile(
            r"""(?i)([\w-]*(?:pass(?:word|wd)?|pwd|secret|token|api[_-]?key|access[_-]?key))"""
            r"""(["']?\s*[=:]\s*)("[^"]*"|'[^']*'|[^\s,;&)}\]]+)"""
        ),
        r"\1\2***",
    ),
)


def redacted(text: str) -> str:
    """One line of limited length, without passwords, tokens and keys."""
    line = " ".join(text[: 4 * MAX_CHARACTERS].split())
    for pattern, mask in _SECRETS:
        line = pattern.sub(mask, line)
    printable = "".join(character if character.isprintable() else "?" for character in line)
    return printable if len(printable) <= MAX_CHARACTERS else printable[: MAX_CHARACTERS - 1] + "…"


def text_of(error: BaseException) -> str:
    """The text of an error, also if its `__str__` raises."""
    try:
        return str(error)
    except Exception:
        return "its text cannot be read"


def described(error: BaseException) -> str:
    """Type and text of an error, without secrets. A group of one error is described by that one."""
    if isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        return described(error.exceptions[0])
    text = text_of(error)
    if not text and isinstance(error, asyncio.CancelledError):
        text = "what it waited for was cancelled"
    return redacted(f"{type(error).__name__}: {text}" if text else type(error).__name__)
