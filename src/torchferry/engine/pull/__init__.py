"""The pull of a state over HTTP, or through memory.

A source publishes versions (`published`, `version_store`) and answers requests (`handler`). A receiver runs
`fetch`, with all its `sources`; each is a `remote` one. Chunks come in lanes (`receiving`).
"""
