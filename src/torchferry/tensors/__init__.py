"""State to manifest and back: everything that knows torch, and nothing of the outside world.

`describe` turns a state into a manifest and the memory behind it, `assemble` turns a manifest and memory
into a state. Between the two, each kind of leaf is one place (`kinds`), each kind of container one entry
(`branches`), each kind of value one entry (`values`), and holds both halves: how it is described and how
it is rebuilt.
"""
