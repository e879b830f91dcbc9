"""Other libraries at the same work: ``make bench-peers``.

Each contender is a module with a class of the same five steps, driven as the library's own documentation shows, with
the fastest settings that it names, and is run by the interpreter of an environment of its own.
"""
