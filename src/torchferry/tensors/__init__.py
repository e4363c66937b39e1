"""State to manifest and back: everything that knows torch, and no I/O.

`describe` turns a state into a manifest and the memory behind it, `assemble` turns a manifest and memory into
a state. Each kind of leaf (`kinds`), container (`containers`) and value (`values`) is one entry with both
directions: how it is described and how it is rebuilt.
"""
