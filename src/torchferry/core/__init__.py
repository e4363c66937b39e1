"""The pure part: descriptions of a state, their encoding, and the plan that follows from them.

No torch, no clock, no randomness, no threads, no logging, no input or output. Everything here is a
function of its arguments, which is what lets the tests run it by the thousand.
"""
