"""The benchmarks: ``make bench``, ``make bench-quick`` and ``make bench-peers``.

One module per subject, each with ``measure``, which answers figures by name, and ``report``, which puts them into
words. docs/reference/performance.md says what each figure means.
"""
