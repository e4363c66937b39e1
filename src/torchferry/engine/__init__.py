"""The engine, the one place where core, tensors and links meet: deadlines, threads, windows and staging.

Here is what a push and a pull share: the bytes of a described state (`source`, `sink`, `target`, `loading`),
plans and buffers (`metadata`, `workspace`), and deadlines. `push`, `pull` and `sync` have the rest.
"""
